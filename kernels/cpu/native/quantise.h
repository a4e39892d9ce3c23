// Activations to int8, or to 16 bits as two int8 halves: groups of 32 columns, each with a scale.
//
// Eight bits leave the perplexity within 1 %, but decide anew where two tokens are near: of a near
// tie of 0.08 nats nothing is left. With sixteen, an engine's errors are those of its weights; batches
// and prompts pay for that with twice the products, while a row alone waits for its weights' bytes.
#pragma once

#include "api.h"
#include "simd.h"

namespace tokenline {

constexpr int kGroup = 32;

TL_INLINE int64_t num_groups(int64_t columns) { return (columns + kGroup - 1) / kGroup; }

// Below this, a group counts as zeros: its scale's inverse would overflow.
constexpr float kSmallestMagnitude = 1e-30f;

// q, or its halves: q = 255 · high + low, all in [-127, 127].
constexpr float kMostInt8 = 127.0f;
constexpr int kHalfBase = 255;

// The largest q.
TL_INLINE float most_quantised(int32_t halves) {
  return halves == 1 ? kMostInt8 : kMostInt8 * kHalfBase + kMostInt8;
}

// 255 · a.
TL_INLINE I32x16 times_half_base(I32x16 a) { return shift_left<8>(a) - a; }

// Sixteen columns: q at `quantised`, or its high half there and the low one `low` bytes further on.
TL_INLINE void store_quantised(int8_t* quantised, int32_t halves, int64_t low, I32x16 q) {
  if (halves == 1) {
    store_i8(quantised, q);
    return;
  }
  // 255 is odd, so no quotient lies in the middle between two integers.
  const I32x16 high = round_to_int(to_float(q) * broadcast(1.0f / kHalfBase));
  store_i8(quantised, high);
  store_i8(quantised + low, q - times_half_base(high));
}

// One group of 32 columns: x ≈ scale · q, q to nearest even, and sum = scale · Σq. Scale and sum are
// NaN where x holds a value that is not finite, so that whatever is made of them is NaN too. With two
// halves, the low ones lie `low` bytes after the high ones.
TL_INLINE void quantise_group(F32x16 first, F32x16 second, int32_t halves, int64_t low,
                              int8_t* quantised, float* scale, float* sum_of_group) {
  // As integers, magnitudes have the order of the floats, and what is not finite comes last.
  const int32_t bits = largest(larger(as_int(magnitude(first)), as_int(magnitude(second))));
  float most;
  std::memcpy(&most, &bits, 4);
  const bool is_finite = bits < 0x7f800000;
  if (!is_finite || most < kSmallestMagnitude) {
    std::memset(quantised, 0, kGroup);
    if (halves == 2) std::memset(quantised + low, 0, kGroup);
    *scale = *sum_of_group = is_finite ? 0.0f : NAN;
    return;
  }
  const float most_q = most_quantised(halves);
  const F32x16 inverse = broadcast(most_q / most);
  const I32x16 q0 = round_to_int(first * inverse), q1 = round_to_int(second * inverse);
  store_quantised(quantised, halves, low, q0);
  store_quantised(quantised + kLanes, halves, low, q1);
  *scale = most / most_q;
  *sum_of_group = *scale * static_cast<float>(sum(q0 + q1));
}

// The same for group `g` of row `row` of `out`, which has `groups`.
TL_INLINE void quantise_group(const TlRows& out, int64_t row, int64_t g, int64_t groups,
                              F32x16 first, F32x16 second) {
  const int64_t place = row * groups + g;
  int8_t* quantised = out.quantised + (row * out.halves * groups + g) * kGroup;
  quantise_group(first, second, out.halves, groups * kGroup, quantised, out.scales + place,
                 out.sums + place);
}

}  // namespace tokenline
