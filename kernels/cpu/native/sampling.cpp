// The C interface of sampling: choosing a token per row, and log-probabilities.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "program.h"
#include "sampling_draw.h"
#include "sampling_filters.h"
#include "sampling_noise.h"
#include "sampling_row.h"

namespace tokenline {
namespace {

constexpr float kGreedyTemperature = 1e-5f;

// Laid out in a thread's memory.
Workspace make_workspace(Scratch& scratch, int64_t vocab_size) {
  const size_t blocks = static_cast<size_t>(num_blocks(vocab_size));
  const size_t tokens = blocks * kBlock;
  char* memory = scratch.get<char>(tokens * (sizeof(Candidate) + sizeof(float)) +
                                   2 * blocks * sizeof(float));
  Workspace result;
  result.candidates = reinterpret_cast<Candidate*>(memory);
  result.masses = reinterpret_cast<float*>(result.candidates + tokens);
  result.block_maxima = result.masses + tokens;
  result.buffer = result.block_maxima + blocks;
  return result;
}

// Of a scanned row.
class LogSoftmax {
 public:
  explicit LogSoftmax(const LogitRow& row)
      : row_(row),
        log_of_sum_(static_cast<double>(row.largest()) +
                    natural_log(row.exponentials(1.0f))) {}

  float of(float logit) const {
    return static_cast<float>(static_cast<double>(logit) - log_of_sum_);
  }

  // The `count` likeliest tokens in order, those with equal log-probabilities by id.
  void list(int64_t count, const Workspace& workspace, int64_t* ids, float* logprobs) const {
    // Logits that are not equal may have equal log-probabilities, once these are rounded.
    float threshold = row_.bound_of_kth(count, workspace.buffer);
    threshold -= std::fabs(of(threshold)) * 0x1p-22f;
    Candidate* candidates = workspace.candidates;
    int64_t found = 0;
    row_.visit_between(threshold > -INFINITY ? threshold : -INFINITY, INFINITY,
                       [&](int64_t id, float logit) {
                         candidates[found++] = {of(logit), static_cast<int32_t>(id), 1.0};
                       });
    std::partial_sort(candidates, candidates + count, candidates + found);
    for (int64_t i = 0; i < count; i++) {
      ids[i] = candidates[i].id;
      logprobs[i] = candidates[i].logit;
    }
  }

 private:
  const LogitRow& row_;
  double log_of_sum_;
};

}  // namespace
}  // namespace tokenline

using namespace tokenline;

int32_t tl_sample(TlPool* pool, const float* logits, int64_t stride, int64_t vocab_size,
                  int64_t num_rows, const float* temperature, const float* min_p,
                  const int64_t* top_k, const float* top_p, const int64_t* seeds,
                  const int64_t* positions, int64_t* token_ids) {
  return guarded([&] {
    pool->for_each(num_rows, [=](int64_t i, Scratch& scratch) {
      const Workspace workspace = make_workspace(scratch, vocab_size);
      LogitRow row(logits + i * stride, vocab_size, workspace.block_maxima);
      if (!row.scan()) {
        token_ids[i] = -1;
      } else if (temperature[i] >= kGreedyTemperature && top_p[i] > 0) {
        const Filters filters = {temperature[i], min_p[i], top_k[i], top_p[i]};
        const Cut cut = filter(row, filters, workspace);
        token_ids[i] = draw(row, cut, temperature[i], Philox(seeds[i], positions[i]));
      } else {
        token_ids[i] = row.likeliest();
      }
    });
  });
}

int32_t tl_token_logprobs(TlPool* pool, const float* logits, int64_t stride, int64_t vocab_size,
                          int64_t num_rows, const int64_t* chosen, int64_t num_top,
                          float* chosen_logprobs, int64_t* top_ids, float* top_logprobs) {
  return guarded([&] {
    pool->for_each(num_rows, [=](int64_t i, Scratch& scratch) {
      const Workspace workspace = make_workspace(scratch, vocab_size);
      LogitRow row(logits + i * stride, vocab_size, workspace.block_maxima);
      int64_t* ids = top_ids + i * num_top;
      float* logprobs = top_logprobs + i * num_top;
      if (!row.scan()) {
        chosen_logprobs[i] = NAN;
        for (int64_t k = 0; k < num_top; k++) {
          ids[k] = k;
          logprobs[k] = NAN;
        }
        return;
      }
      const LogSoftmax log_softmax(row);
      chosen_logprobs[i] = log_softmax.of(row[chosen[i]]);
      if (num_top) log_softmax.list(num_top, workspace, ids, logprobs);
    });
  });
}
