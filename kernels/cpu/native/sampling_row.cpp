// See sampling_row.h.
#include "sampling_row.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace tokenline {

bool LogitRow::scan() {
  float padded[kBlock];
  uint32_t nan_bits = 0;
  float most = -INFINITY;
  for (int64_t b = 0; b < num_blocks(); b++) {
    const float* values = block(b, padded);
    const F32x16 v0 = load(values), v1 = load(values + kLanes);
    const F32x16 v2 = load(values + 2 * kLanes), v3 = load(values + 3 * kLanes);
    nan_bits |= bits_unordered(v0, v1) | bits_unordered(v2, v3);
    block_maxima_[b] = tokenline::largest(larger(larger(v0, v1), larger(v2, v3)));
    most = block_maxima_[b] > most ? block_maxima_[b] : most;
  }
  largest_ = most;
  if (nan_bits || !std::isfinite(most)) return false;
  int64_t id = 0;
  while (block_maxima_[id / kBlock] < most) id += kBlock;
  while (logits_[id] < most) id++;
  likeliest_ = id;
  return true;
}

double LogitRow::exponentials(float inverse_temperature, float* out) const {
  const F32x16 most = broadcast(largest_), scale = broadcast(inverse_temperature);
  float padded[kBlock];
  F64x16 sums[2] = {zero64(), zero64()};
  for (int64_t b = 0; b < num_blocks(); b++) {
    const float* values = block(b, padded);
    for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
      const F32x16 first = exp((load(values + i) - most) * scale);
      const F32x16 second = exp((load(values + i + kLanes) - most) * scale);
      sums[0] = add(sums[0], first);
      sums[1] = add(sums[1], second);
      if (!out) continue;
      store(out + b * kBlock + i, first);
      store(out + b * kBlock + i + kLanes, second);
    }
  }
  return sum(sums[0]) + sum(sums[1]);
}

float LogitRow::bound_of_kth(int64_t k, float* buffer) const {
  const int64_t count = num_blocks();
  if (k > count) return -INFINITY;
  // Of the k blocks with the largest maxima each has one logit that is no less.
  std::copy(block_maxima_, block_maxima_ + count, buffer);
  std::nth_element(buffer, buffer + k - 1, buffer + count, std::greater<float>());
  return buffer[k - 1];
}

}  // namespace tokenline
