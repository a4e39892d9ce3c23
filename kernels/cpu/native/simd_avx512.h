// The lanes of simd.h on AVX-512: one vector each.
#pragma once

#include "simd_eight.h"

namespace tokenline {

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};

TL_INLINE F32x16 zero() { return {_mm512_setzero_ps()}; }
TL_INLINE F32x16 broadcast(float value) { return {_mm512_set1_ps(value)}; }
TL_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
TL_INLINE F32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TL_INLINE F32x16 load_bf16(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
TL_INLINE F32x16 load_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
TL_INLINE void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
TL_INLINE void store_f16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TL_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
TL_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TL_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TL_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
TL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TL_INLINE F32x16 larger(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
TL_INLINE F32x16 smaller(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
TL_INLINE F32x16 magnitude(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
TL_INLINE F32x16 select_less(F32x16 a, F32x16 b, F32x16 then, F32x16 otherwise) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
}
TL_INLINE I32x16 round_to_int(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
TL_INLINE F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
TL_INLINE I32x16 broadcast_int(int32_t value) { return {_mm512_set1_epi32(value)}; }
TL_INLINE I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
TL_INLINE I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int bits>
TL_INLINE I32x16 shift_left(I32x16 a) {
  return {_mm512_slli_epi32(a.v, bits)};
}
TL_INLINE F32x16 as_float(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
TL_INLINE I32x16 as_int(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
TL_INLINE I32x16 larger(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
// Each value as a byte; all are in [-128, 127].
TL_INLINE void store_i8(int8_t* p, I32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
TL_INLINE void store_int(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }

// Eight of the lanes. Not by a cast: GCC 12 warns of that.
template <int half>
TL_INLINE __m256 lanes_of(F32x16 a) {
  return _mm512_maskz_extractf32x8_ps(0xff, a.v, half);
}
template <int half>
TL_INLINE __m256i lanes_of(I32x16 a) {
  return _mm512_maskz_extracti32x8_epi32(0xff, a.v, half);
}

TL_INLINE float sum(F32x16 a) {
  return sum_of_8(_mm256_add_ps(lanes_of<0>(a), lanes_of<1>(a)));
}
TL_INLINE float largest(F32x16 a) {
  return largest_of_8(_mm256_max_ps(lanes_of<0>(a), lanes_of<1>(a)));
}
TL_INLINE int32_t sum(I32x16 a) {
  return sum_of_8(_mm256_add_epi32(lanes_of<0>(a), lanes_of<1>(a)));
}
TL_INLINE int32_t largest(I32x16 a) {
  return largest_of_8(_mm256_max_epi32(lanes_of<0>(a), lanes_of<1>(a)));
}

}  // namespace tokenline
