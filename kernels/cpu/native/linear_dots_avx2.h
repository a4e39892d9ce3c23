// The dot products of linear_dots.h by AVX2, or by AVX-VNNI: the same registers, with one instruction
// for what takes AVX2 two to four.
#pragma once

#include "linear_rows.h"

namespace tokenline {

constexpr int rows_per_tile(int halves) { return 4 / halves; }
constexpr int kFloatRowsPerTile = 6;

TL_INLINE __m256i broadcast_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

#if defined(TL_AVXVNNI)

constexpr bool kOffsetsInt8 = true;

// Adds to each row's sums a quad of 16 weights gives, these as unsigned bytes in two halves.
template <int R>
TL_INLINE void add_quad(const __m256i (&weights)[2], GroupRows x, int quad, I32x16 (&sums)[R]) {
  TL_UNROLL
  for (int r = 0; r < R; r++) {
    const __m256i x_quad = broadcast_quad(x.quad(r, quad));
    sums[r].lo = _mm256_dpbusd_avx_epi32(sums[r].lo, weights[0], x_quad);
    sums[r].hi = _mm256_dpbusd_avx_epi32(sums[r].hi, weights[1], x_quad);
  }
}

TL_INLINE __m256i load_half(const uint8_t* values, int half) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + half * 32));
}

template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m256i low_halves = _mm256_set1_epi8(15);
  TL_UNROLL
  for (int part = 0; part < 4; part++) {
    __m256i even[2], odd[2];
    for (int half = 0; half < 2; half++) {
      const __m256i both = load_half(values + part * kQuadBytes, half);
      even[half] = _mm256_and_si256(both, low_halves);
      odd[half] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_halves);
    }
    add_quad(even, x, 2 * part, sums);
    add_quad(odd, x, 2 * part + 1, sums);
  }
}

template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m256i offset = _mm256_set1_epi8(-128);
  TL_UNROLL
  for (int quad = 0; quad < 8; quad++) {
    __m256i weights[2];
    for (int half = 0; half < 2; half++) {
      weights[half] = _mm256_xor_si256(load_half(values + quad * kQuadBytes, half), offset);
    }
    add_quad(weights, x, quad, sums);
  }
}

#else

constexpr bool kOffsetsInt8 = false;

// Keeps the compiler from moving sums to memory.
TL_INLINE void pin(__m256i& sums) { asm volatile("" : "+x"(sums)); }

// Keeps the compiler from loading scales while all registers hold sums.
TL_INLINE void load_the_rest_later() { asm volatile("" ::: "memory"); }

// A lane sums pairs of columns in 16 bits: 16 products of 15 · 127 at most.
template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m256i low_halves = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i pairs[R][2];
  TL_UNROLL
  for (int part = 0; part < 4; part++) {
    TL_UNROLL
    for (int half = 0; half < 2; half++) {
      const auto* place =
          reinterpret_cast<const __m256i*>(values + part * kQuadBytes + half * 32);
      const __m256i both = _mm256_loadu_si256(place);
      const __m256i even = _mm256_and_si256(both, low_halves);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_halves);
      TL_UNROLL
      for (int r = 0; r < R; r++) {
        const __m256i x_even = broadcast_quad(x.quad(r, 2 * part));
        const __m256i x_odd = broadcast_quad(x.quad(r, 2 * part + 1));
        const __m256i first = _mm256_maddubs_epi16(even, x_even);
        const __m256i second = _mm256_maddubs_epi16(odd, x_odd);
        pairs[r][half] = part == 0 ? _mm256_add_epi16(first, second)
                                   : _mm256_add_epi16(_mm256_add_epi16(pairs[r][half], first),
                                                      second);
        pin(pairs[r][half]);
      }
    }
  }
  TL_UNROLL
  for (int r = 0; r < R; r++) {
    sums[r].lo = _mm256_madd_epi16(pairs[r][0], ones);
    sums[r].hi = _mm256_madd_epi16(pairs[r][1], ones);
  }
  load_the_rest_later();
}

// |w| times x with the sign of w: 2 · 128 · 127 still fits into 16 bits.
template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m256i ones = _mm256_set1_epi16(1);
  TL_UNROLL
  for (int quad = 0; quad < 8; quad++) {
    TL_UNROLL
    for (int half = 0; half < 2; half++) {
      const auto* place =
          reinterpret_cast<const __m256i*>(values + quad * kQuadBytes + half * 32);
      const __m256i weights = _mm256_loadu_si256(place);
      const __m256i magnitudes = _mm256_abs_epi8(weights);
      TL_UNROLL
      for (int r = 0; r < R; r++) {
        const __m256i x_quad = _mm256_sign_epi8(broadcast_quad(x.quad(r, quad)), weights);
        const __m256i four = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, x_quad), ones);
        __m256i& sum = half == 0 ? sums[r].lo : sums[r].hi;
        sum = quad == 0 ? four : _mm256_add_epi32(sum, four);
        pin(sum);
      }
    }
  }
}

#endif  // TL_AVXVNNI

}  // namespace tokenline
