// What sampling needs of sixteen lanes beyond simd.h: comparisons as bits, choices by bits, sums in
// double precision. The same bits on every instruction set.
#pragma once

#include "simd.h"

namespace tokenline {

// Where a comparison gives bits, bit i is that of lane i, and false where either is NaN.

#if defined(TL_AVX512)

TL_INLINE uint32_t bits_not_less(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
}
TL_INLINE uint32_t bits_greater(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
}
// Set where a or b is NaN.
TL_INLINE uint32_t bits_unordered(F32x16 a, F32x16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q);
}
TL_INLINE F32x16 select_bits(uint32_t bits, F32x16 then, F32x16 otherwise) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), otherwise.v, then.v)};
}
template <int bits>
TL_INLINE I32x16 shift_right(I32x16 a) {
  return {_mm512_srli_epi32(a.v, bits)};
}

struct F64x16 {
  __m512d lo, hi;
};
TL_INLINE F64x16 zero64() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
TL_INLINE F64x16 add(F64x16 sums, F32x16 a) {
  const __m256 hi = _mm512_extractf32x8_ps(a.v, 1);
  return {_mm512_add_pd(sums.lo, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v))),
          _mm512_add_pd(sums.hi, _mm512_cvtps_pd(hi))};
}
TL_INLINE void store(double* p, F64x16 a) {
  _mm512_storeu_pd(p, a.lo);
  _mm512_storeu_pd(p + 8, a.hi);
}

#elif defined(TL_AVX2)

TL_INLINE uint32_t bits_of(__m256 lo, __m256 hi) {
  return static_cast<uint32_t>(_mm256_movemask_ps(lo)) |
         static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
TL_INLINE uint32_t bits_not_less(F32x16 a, F32x16 b) {
  return bits_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
TL_INLINE uint32_t bits_greater(F32x16 a, F32x16 b) {
  return bits_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
TL_INLINE uint32_t bits_unordered(F32x16 a, F32x16 b) {
  return bits_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q));
}
TL_INLINE __m256 select_bits_8(uint32_t bits, __m256 then, __m256 otherwise) {
  const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), places);
  return _mm256_blendv_ps(otherwise, then, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, places)));
}
TL_INLINE F32x16 select_bits(uint32_t bits, F32x16 then, F32x16 otherwise) {
  return {select_bits_8(bits, then.lo, otherwise.lo),
          select_bits_8(bits >> 8, then.hi, otherwise.hi)};
}
template <int bits>
TL_INLINE I32x16 shift_right(I32x16 a) {
  return {_mm256_srli_epi32(a.lo, bits), _mm256_srli_epi32(a.hi, bits)};
}

struct F64x16 {
  __m256d v[4];
};
TL_INLINE F64x16 zero64() {
  const __m256d none = _mm256_setzero_pd();
  return {{none, none, none, none}};
}
TL_INLINE F64x16 add(F64x16 sums, F32x16 a) {
  return {{_mm256_add_pd(sums.v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a.lo))),
           _mm256_add_pd(sums.v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a.lo, 1))),
           _mm256_add_pd(sums.v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(a.hi))),
           _mm256_add_pd(sums.v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(a.hi, 1)))}};
}
TL_INLINE void store(double* p, F64x16 a) {
  for (int i = 0; i < 4; i++) _mm256_storeu_pd(p + 4 * i, a.v[i]);
}

#else

TL_INLINE uint32_t bits_not_less(F32x16 a, F32x16 b) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return bits;
}
TL_INLINE uint32_t bits_greater(F32x16 a, F32x16 b) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= static_cast<uint32_t>(a.v[i] > b.v[i]) << i;
  return bits;
}
TL_INLINE uint32_t bits_unordered(F32x16 a, F32x16 b) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) {
    bits |= static_cast<uint32_t>(a.v[i] != a.v[i] || b.v[i] != b.v[i]) << i;
  }
  return bits;
}
TL_INLINE F32x16 select_bits(uint32_t bits, F32x16 then, F32x16 otherwise) {
  F32x16 result;
  for (int i = 0; i < kLanes; i++) result.v[i] = bits >> i & 1 ? then.v[i] : otherwise.v[i];
  return result;
}
template <int bits>
TL_INLINE I32x16 shift_right(I32x16 a) {
  I32x16 result;
  for (int i = 0; i < kLanes; i++) {
    result.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> bits);
  }
  return result;
}

struct F64x16 {
  double v[kLanes];
};
TL_INLINE F64x16 zero64() { return {}; }
TL_INLINE F64x16 add(F64x16 sums, F32x16 a) {
  for (int i = 0; i < kLanes; i++) sums.v[i] += static_cast<double>(a.v[i]);
  return sums;
}
TL_INLINE void store(double* p, F64x16 a) { std::memcpy(p, a.v, sizeof a.v); }

#endif

// In the order of simd.h's `sum`.
TL_INLINE double sum(F64x16 a) {
  double v[kLanes];
  store(v, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) v[i] = v[i] + v[i + half];
  }
  return v[0];
}

}  // namespace tokenline
