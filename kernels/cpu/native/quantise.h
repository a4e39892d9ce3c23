// Activations to int8: groups of 32 columns, each with its own scale.
#pragma once

#include "api.h"
#include "simd.h"

namespace tokenline {

constexpr int kGroup = 32;

TL_INLINE int64_t num_groups(int64_t columns) { return (columns + kGroup - 1) / kGroup; }

// Below this, a group counts as zeros: its scale's inverse would overflow.
constexpr float kSmallestMagnitude = 1e-30f;

// One group: x ≈ scale · q, q to nearest even in [-127, 127], and sum = scale · Σq. Scale and sum
// are NaN where x holds a value that is not finite, so that whatever is made of them is NaN too.
TL_INLINE void quantise_group(F32x16 first, F32x16 second, int8_t* quantised, float* scale,
                              float* sum_of_group) {
  // As integers, magnitudes have the order of the floats, and what is not finite comes last.
  const int32_t bits = largest(larger(as_int(magnitude(first)), as_int(magnitude(second))));
  float most;
  std::memcpy(&most, &bits, 4);
  const bool is_finite = bits < 0x7f800000;
  if (!is_finite || most < kSmallestMagnitude) {
    std::memset(quantised, 0, kGroup);
    *scale = *sum_of_group = is_finite ? 0.0f : NAN;
    return;
  }
  const F32x16 inverse = broadcast(127.0f / most);
  const I32x16 q0 = round_to_int(first * inverse), q1 = round_to_int(second * inverse);
  store_i8(quantised, q0);
  store_i8(quantised + kLanes, q1);
  *scale = most / 127.0f;
  *sum_of_group = *scale * static_cast<float>(sum(q0 + q1));
}

// Writes row `row` of `out`, in the forms that it has, from `width` values. `values` has room for,
// and gets, zeros up to a multiple of 32 columns.
TL_INLINE void write_row(const TlRows& out, int64_t row, float* values, int64_t width) {
  const int64_t groups = num_groups(width);
  if (out.values) {
    std::memcpy(out.values + row * out.stride, values, static_cast<size_t>(width) * sizeof(float));
  }
  if (!out.quantised) return;
  for (int64_t i = width; i < groups * kGroup; i++) values[i] = 0.0f;
  for (int64_t g = 0; g < groups; g++) {
    const float* x = values + g * kGroup;
    const int64_t place = row * groups + g;
    quantise_group(load(x), load(x + kLanes), out.quantised + place * kGroup, out.scales + place,
                   out.sums + place);
  }
}

}  // namespace tokenline
