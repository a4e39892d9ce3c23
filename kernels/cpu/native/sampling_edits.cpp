// The C interface of what changes logits before a token is chosen: masks, biases, penalties.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "program.h"
#include "sampling_lanes.h"

namespace tokenline {
namespace {

// Tokens of which bit t mod 32 of allowed[t div 32] is not set lose all; NaN stays NaN.
void mask_row(float* logits, int64_t vocab_size, const int32_t* allowed) {
  const F32x16 nothing = broadcast(-INFINITY);
  for (int64_t i = 0; i < vocab_size; i += kLanes) {
    const uint32_t word = static_cast<uint32_t>(allowed[i / 32]);
    const uint32_t bits = word >> (i % 32) & 0xFFFF;
    if (bits == 0xFFFF) continue;
    const F32x16 before = load_some(logits + i, vocab_size - i);
    store_some(logits + i, select_bits(bits, before, before + nothing), vocab_size - i);
  }
}

struct Penalties {
  float repetition, presence, frequency;
};

// `counts` [vocab_size] are zeros, before and after.
void penalise_row(float* logits, int64_t vocab_size, const int32_t* token_ids, int64_t prompt_len,
                  int64_t seq_len, Penalties penalties, int32_t* counts) {
  const auto is_known = [=](int32_t id) { return id >= 0 && id < vocab_size; };
  // A token of the prompt counts 1, each of the output 2.
  for (int64_t i = 0; i < seq_len; i++) {
    if (!is_known(token_ids[i])) continue;
    int32_t& count = counts[token_ids[i]];
    count = i < prompt_len ? count | 1 : count + 2;
  }
  for (int64_t i = 0; i < seq_len; i++) {
    const int32_t id = token_ids[i];
    if (!is_known(id) || !counts[id]) continue;
    const float num_outputs = static_cast<float>(counts[id] / 2);
    counts[id] = 0;
    const float before = logits[id];
    const float repeated =
        before > 0 ? before / penalties.repetition : before * penalties.repetition;
    const float presence = num_outputs > 0 ? penalties.presence : 0.0f;
    logits[id] = repeated - (presence + num_outputs * penalties.frequency);
  }
}

}  // namespace
}  // namespace tokenline

using namespace tokenline;

int32_t tl_mask_logits(TlPool* pool, float* logits, int64_t stride, int64_t vocab_size,
                       int64_t num_rows, const int64_t* rows, const int32_t* allowed) {
  return guarded([&] {
    const int64_t num_words = (vocab_size + 31) / 32;
    pool->for_each(num_rows, [=](int64_t i, Scratch&) {
      mask_row(logits + rows[i] * stride, vocab_size, allowed + i * num_words);
    });
  });
}

void tl_bias_logits(float* logits, int64_t stride, int64_t num_biases, const int64_t* rows,
                    const int64_t* token_ids, const float* biases) {
  for (int64_t i = 0; i < num_biases; i++) logits[rows[i] * stride + token_ids[i]] += biases[i];
}

int32_t tl_penalize(TlPool* pool, float* logits, int64_t stride, int64_t vocab_size,
                    int64_t num_rows, const int64_t* rows, const int32_t* token_ids,
                    int64_t token_stride, const int64_t* prompt_lens, const int64_t* seq_lens,
                    const float* repetition, const float* presence, const float* frequency) {
  return guarded([&] {
    pool->for_each(num_rows, [=](int64_t i, Scratch& scratch) {
      int32_t* counts = scratch.get<int32_t>(static_cast<size_t>(vocab_size));
      std::fill(counts, counts + vocab_size, 0);
      const int64_t row = rows ? rows[i] : i;
      penalise_row(logits + row * stride, vocab_size, token_ids + i * token_stride, prompt_lens[i],
                   seq_lens[i], {repetition[i], presence[i], frequency[i]}, counts);
    });
  });
}
