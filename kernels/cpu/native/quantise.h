// Activations to 16 bits, as two int8 halves: groups of 32 columns, each with its own scale.
//
// Eight bits would do for a perplexity within 1 %, but turned answers where two tokens were near: of
// a near tie of 0.08 nats nothing is left. With sixteen, an engine's errors are those of its weights.
// A row alone waits for its weights' bytes either way.
#pragma once

#include "api.h"
#include "simd.h"

namespace tokenline {

constexpr int kGroup = 32;

TL_INLINE int64_t num_groups(int64_t columns) { return (columns + kGroup - 1) / kGroup; }

// Below this, a group counts as zeros: its scale's inverse would overflow.
constexpr float kSmallestMagnitude = 1e-30f;

// q = 255 · high + low, both in [-127, 127].
constexpr int kHalfBase = 255;
constexpr float kMostQuantised = 127.0f * kHalfBase + 127.0f;

// 255 · a.
TL_INLINE I32x16 times_half_base(I32x16 a) { return shift_left<8>(a) - a; }

// Sixteen columns: the halves of q, at `quantised` and `low` bytes further on.
TL_INLINE void store_halves(int8_t* quantised, int64_t low, I32x16 q) {
  // 255 is odd, so no quotient lies in the middle between two integers.
  const I32x16 high = round_to_int(to_float(q) * broadcast(1.0f / kHalfBase));
  store_i8(quantised, high);
  store_i8(quantised + low, q - times_half_base(high));
}

// One group of a row of `groups`: x ≈ scale · q, q to nearest even, and sum = scale · Σq. Scale and
// sum are NaN where x holds a value that is not finite, so that whatever is made of them is NaN too.
// `quantised` points at the group's high halves, and to the low ones the row's other half.
TL_INLINE void quantise_group(F32x16 first, F32x16 second, int64_t groups, int8_t* quantised,
                              float* scale, float* sum_of_group) {
  const int64_t low = groups * kGroup;
  // As integers, magnitudes have the order of the floats, and what is not finite comes last.
  const int32_t bits = largest(larger(as_int(magnitude(first)), as_int(magnitude(second))));
  float most;
  std::memcpy(&most, &bits, 4);
  const bool is_finite = bits < 0x7f800000;
  if (!is_finite || most < kSmallestMagnitude) {
    std::memset(quantised, 0, kGroup);
    std::memset(quantised + low, 0, kGroup);
    *scale = *sum_of_group = is_finite ? 0.0f : NAN;
    return;
  }
  const F32x16 inverse = broadcast(kMostQuantised / most);
  const I32x16 q0 = round_to_int(first * inverse), q1 = round_to_int(second * inverse);
  store_halves(quantised, low, q0);
  store_halves(quantised + kLanes, low, q1);
  *scale = most / kMostQuantised;
  *sum_of_group = *scale * static_cast<float>(sum(q0 + q1));
}

// The same for group `g` of row `row` of `out`.
TL_INLINE void quantise_group(const TlRows& out, int64_t row, int64_t g, int64_t groups,
                              F32x16 first, F32x16 second) {
  const int64_t place = row * groups + g;
  quantise_group(first, second, groups, out.quantised + (row * 2 * groups + g) * kGroup,
                 out.scales + place, out.sums + place);
}

}  // namespace tokenline
