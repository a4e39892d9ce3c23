// What rows of queries have of the keys so far, and how segments of keys are put together.
#pragma once

#include <cfloat>
#include <cstdint>

#include "simd.h"

namespace tokenline {

// How many rows go together at most. With six, the conversion of keys and values to floats is
// hidden behind the arithmetic: more rows, or floats made beforehand, are no faster.
constexpr int kMostRows = 6;

// Kernels exist for 1, 2, 3, 4 and 6 rows; 5 go as 6, the last one doubled.
TL_INLINE int kernel_rows(int64_t rows) { return rows == 5 ? 6 : static_cast<int>(rows); }

// What rows have of the keys so far, in floats: their largest scores [16], their sums of
// exponentials [16], and their sums of values [kernel_rows][width].
constexpr int kStateHeader = 2 * kLanes;

TL_INLINE int64_t state_floats(int rows, int64_t width) { return kStateHeader + rows * width; }

// Of all rows of a tile, in groups of kMostRows.
TL_INLINE int64_t tile_floats(int64_t num_rows, int64_t width) {
  const int64_t left = num_rows % kMostRows;
  return num_rows / kMostRows * state_floats(kMostRows, width) +
         (left ? state_floats(kernel_rows(left), width) : 0);
}

// 2^x to about 1 ulp, for x in [-100, 0]. Below it is 2^-100, which beside the 1 of the largest
// score is as good as nothing, and whose products stay clear of subnormal numbers, which are slow.
// NaN stays NaN. The polynomial is a minimax fit of 2^r over [-1/2, 1/2].
TL_INLINE F32x16 power_of_two(F32x16 x) {
  const F32x16 clamped = larger(broadcast(-100.0f), x);
  // Beside 1.5 · 2^23 there is no room for a fraction: the sum's lowest bits are round(x) + 127.
  const F32x16 rounding = broadcast(12582912.0f + 127.0f);
  const F32x16 rounded = clamped + rounding;
  const F32x16 r = clamped - (rounded - rounding);
  F32x16 p = broadcast(1.326472731e-3f);
  p = fma(p, r, broadcast(9.671512991e-3f));
  p = fma(p, r, broadcast(5.550733581e-2f));
  p = fma(p, r, broadcast(2.402224243e-1f));
  p = fma(p, r, broadcast(6.931470037e-1f));
  p = fma(p, r, broadcast(1.0f));
  return p * as_float(shift_left<23>(as_int(rounded)));
}

// The state before any key.
TL_INLINE void clear_state(float* state, int rows, int64_t width) {
  store(state, broadcast(-FLT_MAX));
  for (int64_t i = kLanes; i < state_floats(rows, width); i += kLanes) store(state + i, zero());
}

// Adds to `state` that of a later segment (Milakov and Gimelshein, "Online normalizer calculation
// for softmax", 2018). One without any key that a row sees leaves that row as it is.
TL_INLINE void fold_state(float* state, const float* later, int rows, int64_t width) {
  alignas(64) float old_factor[kLanes], new_factor[kLanes];
  const F32x16 before = load(state), most = larger(before, load(later));
  const F32x16 a = power_of_two(before - most), b = power_of_two(load(later) - most);
  store(state, most);
  store(state + kLanes, fma(load(state + kLanes), a, load(later + kLanes) * b));
  store(old_factor, a);
  store(new_factor, b);
  state += kStateHeader;
  later += kStateHeader;
  for (int r = 0; r < rows; r++) {
    const F32x16 keep = broadcast(old_factor[r]), add = broadcast(new_factor[r]);
    for (int64_t i = 0; i < width; i += kLanes, state += kLanes, later += kLanes) {
      store(state, fma(load(state), keep, load(later) * add));
    }
  }
}

}  // namespace tokenline
