// The dot products of linear_dots.h by AVX-512-VNNI.
#pragma once

#include "linear_rows.h"

namespace tokenline {

constexpr int rows_per_tile(int /*halves*/) { return 8; }
constexpr int kFloatRowsPerTile = 8;
constexpr bool kOffsetsInt8 = true;

TL_INLINE __m512i broadcast_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}

template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m512i low_halves = _mm512_set1_epi8(15);
  TL_UNROLL
  for (int part = 0; part < 4; part++) {
    const __m512i both = _mm512_loadu_si512(values + part * kQuadBytes);
    const __m512i even = _mm512_and_si512(both, low_halves);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_halves);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      sums[r].v = _mm512_dpbusd_epi32(sums[r].v, even, broadcast_quad(x.quad(r, 2 * part)));
      sums[r].v = _mm512_dpbusd_epi32(sums[r].v, odd, broadcast_quad(x.quad(r, 2 * part + 1)));
    }
  }
}

template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m512i offset = _mm512_set1_epi8(-128);
  TL_UNROLL
  for (int quad = 0; quad < 8; quad++) {
    const __m512i stored = _mm512_loadu_si512(values + quad * kQuadBytes);
    const __m512i weights = _mm512_xor_si512(stored, offset);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      sums[r].v = _mm512_dpbusd_epi32(sums[r].v, weights, broadcast_quad(x.quad(r, quad)));
    }
  }
}

}  // namespace tokenline
