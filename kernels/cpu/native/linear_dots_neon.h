// The dot products of linear_dots.h by NEON's sdot.
#pragma once

#include <arm_neon.h>

#include "linear_rows.h"

namespace tokenline {

constexpr int rows_per_tile(int halves) { return 4 / halves; }
constexpr int kFloatRowsPerTile = 4;
constexpr bool kOffsetsInt8 = false;

TL_INLINE int8x16_t broadcast_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}

// Four lanes' quads at a time.
template <int R, class Load>
TL_INLINE void add_dots(GroupRows x, I32x16 (&sums)[R], Load load_quads) {
  TL_UNROLL
  for (int lanes = 0; lanes < 4; lanes++) {
    int32x4_t four[R];
    TL_UNROLL
    for (int r = 0; r < R; r++) four[r] = vdupq_n_s32(0);
    TL_UNROLL
    for (int part = 0; part < 4; part++) {
      int8x16_t even, odd;
      load_quads(part, lanes, &even, &odd);
      TL_UNROLL
      for (int r = 0; r < R; r++) {
        four[r] = vdotq_s32(four[r], even, broadcast_quad(x.quad(r, 2 * part)));
        four[r] = vdotq_s32(four[r], odd, broadcast_quad(x.quad(r, 2 * part + 1)));
      }
    }
    TL_UNROLL
    for (int r = 0; r < R; r++) vst1q_s32(sums[r].v + lanes * 4, four[r]);
  }
}

template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  add_dots(x, sums, [&](int part, int lanes, int8x16_t* even, int8x16_t* odd) {
    const uint8x16_t both = vld1q_u8(values + part * kQuadBytes + lanes * 16);
    *even = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    *odd = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  });
}

template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  add_dots(x, sums, [&](int part, int lanes, int8x16_t* even, int8x16_t* odd) {
    const uint8_t* place = values + 2 * part * kQuadBytes + lanes * 16;
    *even = vreinterpretq_s8_u8(vld1q_u8(place));
    *odd = vreinterpretq_s8_u8(vld1q_u8(place + kQuadBytes));
  });
}

}  // namespace tokenline
