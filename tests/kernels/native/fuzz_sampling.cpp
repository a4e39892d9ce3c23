// Fuzzes what the sampler does to logits: masks, biases, penalties, draws and log-probabilities.
#include <cmath>
#include <limits>

#include "fuzz.h"

namespace fuzz {
namespace {

// Rows of logits and of what is asked for each, in memory of its own for each row.
struct Logits {
  Logits(Random& random, int64_t n, int64_t vocab)
      : num_rows(n), vocab_size(vocab), stride(vocab + (random.coin() ? 0 : 7)),
        values((n - 1) * stride + vocab), temperature(n), min_p(n), top_p(n), repetition(n),
        presence(n), frequency(n), top_k(n), seeds(n), positions(n), chosen(n), rows(n),
        prompt_lens(n), seq_lens(n), token_ids(n * kMostTokens), allowed(n * ((vocab + 31) / 32)) {
    for (int64_t row = 0; row < n; row++) {
      float* logits = values.data() + row * stride;
      const int64_t kind = random.coin() ? 0 : random.integer(0, 5);
      for (int64_t i = 0; i < vocab; i++) logits[i] = random.value(kind) * 4;
      // Impossible tokens, and likely ones that are equal.
      const int64_t impossible = random.coin() ? 0 : random.integer(0, vocab - 1);
      for (int64_t i = 0; i < impossible; i++) {
        logits[random.integer(0, vocab - 1)] = -std::numeric_limits<float>::infinity();
      }
      for (int64_t i = 0; i < 3; i++) logits[random.integer(0, vocab - 1)] = 20.0f;
      temperature[row] = random.coin() ? 0.0f : 1.0f + random.fraction();
      min_p[row] = random.coin() ? 0.0f : 0.5f + random.fraction() / 2;
      top_p[row] = random.coin() ? 1.0f : 0.5f + random.fraction() / 2;
      top_k[row] = random.coin() ? 0 : random.integer(1, vocab);
      seeds[row] = static_cast<int64_t>(random.bits());
      positions[row] = random.integer(0, 1 << 20);
      chosen[row] = random.integer(0, vocab - 1);
      rows[row] = n - 1 - row;
      repetition[row] = random.coin() ? 1.0f : 1.5f + random.fraction();
      presence[row] = random.fraction() * 2;
      frequency[row] = random.fraction() * 2;
      seq_lens[row] = random.integer(0, kMostTokens);
      prompt_lens[row] = random.integer(0, seq_lens[row]);
      for (int64_t i = 0; i < kMostTokens; i++) {
        token_ids[row * kMostTokens + i] = static_cast<int32_t>(random.integer(0, vocab - 1));
      }
    }
    for (int64_t i = 0; i < allowed.size(); i++) allowed[i] = static_cast<int32_t>(random.bits());
  }

  static constexpr int64_t kMostTokens = 50;

  int64_t num_rows, vocab_size, stride;
  Buffer<float> values, temperature, min_p, top_p, repetition, presence, frequency;
  Buffer<int64_t> top_k, seeds, positions, chosen, rows, prompt_lens, seq_lens;
  Buffer<int32_t> token_ids, allowed;
};

void edit(TlPool* pool, Logits& x) {
  tl_penalize(pool, x.values.data(), x.stride, x.vocab_size, x.num_rows, x.rows.data(),
              x.token_ids.data(), Logits::kMostTokens, x.prompt_lens.data(), x.seq_lens.data(),
              x.repetition.data(), x.presence.data(), x.frequency.data());
  tl_bias_logits(x.values.data(), x.stride, x.num_rows, x.rows.data(), x.chosen.data(),
                 x.presence.data());
  // Half of the rows.
  tl_mask_logits(pool, x.values.data(), x.stride, x.vocab_size, x.num_rows / 2, x.rows.data(),
                 x.allowed.data());
}

struct Choices {
  explicit Choices(const Logits& x, int64_t top)
      : num_top(top), ids(x.num_rows), top_ids(x.num_rows * top), logprobs(x.num_rows),
        top_logprobs(x.num_rows * top) {}

  // Rows from `first` on.
  void choose(TlPool* pool, const Logits& x, int64_t first, int64_t count) {
    const float* values = x.values.data() + first * x.stride;
    tl_sample(pool, values, x.stride, x.vocab_size, count, x.temperature.data() + first,
              x.min_p.data() + first, x.top_k.data() + first, x.top_p.data() + first,
              x.seeds.data() + first, x.positions.data() + first, ids.data() + first);
    tl_token_logprobs(pool, values, x.stride, x.vocab_size, count, x.chosen.data() + first, num_top,
                      logprobs.data() + first, top_ids.data() + first * num_top,
                      top_logprobs.data() + first * num_top);
  }

  bool has_equal_row(const Choices& other, int64_t row) const {
    const size_t bytes = static_cast<size_t>(num_top) * sizeof(int64_t);
    return ids[row] == other.ids[row] &&
           are_equal(logprobs.data() + row, other.logprobs.data() + row, 1) &&
           are_equal(top_logprobs.data() + row * num_top, other.top_logprobs.data() + row * num_top,
                     num_top) &&
           std::memcmp(top_ids.data() + row * num_top, other.top_ids.data() + row * num_top,
                       bytes) == 0;
  }

  int64_t num_top;
  Buffer<int64_t> ids, top_ids;
  Buffer<float> logprobs, top_logprobs;
};

void fuzz_one(Pools& pools, uint64_t seed) {
  Random random(seed);
  const int64_t num_rows = random.integer(1, 12);
  const int64_t vocab_size = random.coin() ? random.integer(1, 70) : random.integer(1, 5000);
  const int64_t num_top = std::min<int64_t>(random.integer(0, 20), vocab_size);
  const uint64_t logits_seed = random.bits();
  const auto make = [&](TlPool* pool) {
    Random same(logits_seed);
    Logits logits(same, num_rows, vocab_size);
    edit(pool, logits);
    return logits;
  };
  Logits x = make(pools.one);
  const Logits threaded = make(pools.many);
  for (int64_t row = 0; row < num_rows; row++) {
    check(are_equal(x.values.data() + row * x.stride, threaded.values.data() + row * x.stride,
                    vocab_size), "edited logits, on threads");
  }
  Choices expected(x, num_top), others(x, num_top);
  expected.choose(pools.one, x, 0, num_rows);
  {
    Digest digest("sampling");
    digest.add_rows(x.values.data(), num_rows, x.stride, vocab_size);
    digest.add_bytes(expected.ids.data(), num_rows * 8);
    digest.add_bytes(expected.top_ids.data(), expected.top_ids.size() * 8);
    digest.add(expected.logprobs.data(), expected.logprobs.size());
    digest.add(expected.top_logprobs.data(), expected.top_logprobs.size());
  }
  others.choose(pools.many, x, 0, num_rows);
  for (int64_t row = 0; row < num_rows; row++) {
    check(others.has_equal_row(expected, row), "choices, on threads");
  }
  const int64_t chosen = random.integer(0, num_rows - 1);
  others.choose(pools.many, x, chosen, 1);
  check(others.has_equal_row(expected, chosen), "a choice alone");
  x.values[chosen * x.stride + random.integer(0, vocab_size - 1)] = NAN;
  others.choose(pools.many, x, 0, num_rows);
  for (int64_t row = 0; row < num_rows; row++) {
    check(row == chosen || others.has_equal_row(expected, row), "a choice beside a NaN");
  }
}

}  // namespace

void fuzz_sampling(Pools& pools, int rounds) {
  for (int round = 0; round < rounds; round++) fuzz_one(pools, static_cast<uint64_t>(round));
}

}  // namespace fuzz
