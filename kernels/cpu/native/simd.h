// Sixteen lanes of floats and integers: the same bits on every instruction set.
//
// Every function is one IEEE operation per lane (fma rounds once), whatever it is made of, and
// reductions add in one fixed tree. Kernels keep a value per lane and cross lanes only through
// `sum` and `largest`, so that their results do not depend on how wide the machine's vectors are.
// -ffp-contract=off keeps compilers from fusing what is not written as fma.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(TL_AVX512) || defined(TL_AVX2)
#include <immintrin.h>
#endif

#define TL_INLINE inline __attribute__((always_inline))
// Of a lambda, between its parameters and its body.
#define TL_INLINE_LAMBDA __attribute__((always_inline))

namespace tokenline {

constexpr int kLanes = 16;

// ------------------------------------------------------------------------- half precision, alone

// IEEE binary16 to float32: exact.
TL_INLINE float f16_to_f32(uint16_t half) {
#if defined(TL_AVX512) || defined(TL_AVX2)
  return _cvtsh_ss(half);
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 0x1f, fraction = half & 0x3ff;
  float result;
  if (exponent == 0) {
    result = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -result : result;
  }
  const uint32_t bits = exponent == 0x1f
                            ? sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0)
                            : sign | ((exponent + 112) << 23) | (fraction << 13);
  std::memcpy(&result, &bits, 4);
  return result;
#endif
}

// float32 to binary16, to nearest even. A NaN stays one.
TL_INLINE uint16_t f32_to_f16(float value) {
#if defined(TL_AVX512) || defined(TL_AVX2)
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00 | ((bits >> 13) & 0x3ff);
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
  if (bits < 0x38800000) {
    // Subnormal: adding 0.5 leaves the fraction, rounded, in the lowest bits.
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, 4);
    return sign | static_cast<uint16_t>(rounded - 0x3f000000);
  }
  const uint32_t rounded = bits + 0xfff + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
#endif
}

TL_INLINE float bf16_to_f32(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

TL_INLINE uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// ---------------------------------------------------------------------------------------- lanes

#if defined(TL_AVX512)

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

#elif defined(TL_AVX2)

struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};

TL_INLINE F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TL_INLINE F32x16 broadcast(float value) {
  const __m256 v = _mm256_set1_ps(value);
  return {v, v};
}
TL_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TL_INLINE __m256 load_f16_8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
TL_INLINE F32x16 load_f16(const uint16_t* p) { return {load_f16_8(p), load_f16_8(p + 8)}; }
TL_INLINE __m256 load_bf16_8(const uint16_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
TL_INLINE F32x16 load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
TL_INLINE F32x16 load_i8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
TL_INLINE void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
TL_INLINE void store_f16(uint16_t* p, F32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
TL_INLINE F32x16 operator+(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
TL_INLINE F32x16 operator-(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
TL_INLINE F32x16 operator*(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
TL_INLINE F32x16 operator/(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
TL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TL_INLINE F32x16 larger(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
TL_INLINE F32x16 smaller(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
TL_INLINE F32x16 magnitude(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
TL_INLINE F32x16 select_less(F32x16 a, F32x16 b, F32x16 then, F32x16 otherwise) {
  return {_mm256_blendv_ps(otherwise.lo, then.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(otherwise.hi, then.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
TL_INLINE I32x16 round_to_int(F32x16 a) {
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
TL_INLINE F32x16 to_float(I32x16 a) {
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
TL_INLINE I32x16 broadcast_int(int32_t value) {
  const __m256i v = _mm256_set1_epi32(value);
  return {v, v};
}
TL_INLINE I32x16 operator+(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
TL_INLINE I32x16 operator-(I32x16 a, I32x16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
template <int bits>
TL_INLINE I32x16 shift_left(I32x16 a) {
  return {_mm256_slli_epi32(a.lo, bits), _mm256_slli_epi32(a.hi, bits)};
}
TL_INLINE F32x16 as_float(I32x16 a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
TL_INLINE I32x16 as_int(F32x16 a) {
  return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
TL_INLINE I32x16 larger(I32x16 a, I32x16 b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
TL_INLINE void store_i8(int8_t* p, I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
TL_INLINE void store_int(int32_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}

#else

// Plain lanes, which compilers vectorise as far as the target lets them.
struct F32x16 {
  float v[kLanes];
};
struct I32x16 {
  int32_t v[kLanes];
};

#define TL_EACH_LANE(type, expression)            \
  type result;                                    \
  for (int i = 0; i < kLanes; i++) {              \
    result.v[i] = (expression);                   \
  }                                               \
  return result;

TL_INLINE F32x16 zero() { TL_EACH_LANE(F32x16, 0.0f) }
TL_INLINE F32x16 broadcast(float value) { TL_EACH_LANE(F32x16, value) }
TL_INLINE F32x16 load(const float* p) { TL_EACH_LANE(F32x16, p[i]) }
TL_INLINE F32x16 load_f16(const uint16_t* p) { TL_EACH_LANE(F32x16, f16_to_f32(p[i])) }
TL_INLINE F32x16 load_bf16(const uint16_t* p) { TL_EACH_LANE(F32x16, bf16_to_f32(p[i])) }
TL_INLINE F32x16 load_i8(const int8_t* p) { TL_EACH_LANE(F32x16, static_cast<float>(p[i])) }
TL_INLINE void store(float* p, F32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
TL_INLINE void store_f16(uint16_t* p, F32x16 a) {
  for (int i = 0; i < kLanes; i++) p[i] = f32_to_f16(a.v[i]);
}
TL_INLINE F32x16 operator+(F32x16 a, F32x16 b) { TL_EACH_LANE(F32x16, a.v[i] + b.v[i]) }
TL_INLINE F32x16 operator-(F32x16 a, F32x16 b) { TL_EACH_LANE(F32x16, a.v[i] - b.v[i]) }
TL_INLINE F32x16 operator*(F32x16 a, F32x16 b) { TL_EACH_LANE(F32x16, a.v[i] * b.v[i]) }
TL_INLINE F32x16 operator/(F32x16 a, F32x16 b) { TL_EACH_LANE(F32x16, a.v[i] / b.v[i]) }
TL_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  TL_EACH_LANE(F32x16, __builtin_fmaf(a.v[i], b.v[i], c.v[i]))
}
// As x86 has it: b where either is NaN, or both are zero.
TL_INLINE F32x16 larger(F32x16 a, F32x16 b) {
  TL_EACH_LANE(F32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
}
TL_INLINE F32x16 smaller(F32x16 a, F32x16 b) {
  TL_EACH_LANE(F32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
}
TL_INLINE F32x16 magnitude(F32x16 a) { TL_EACH_LANE(F32x16, std::fabs(a.v[i])) }
TL_INLINE F32x16 select_less(F32x16 a, F32x16 b, F32x16 then, F32x16 otherwise) {
  TL_EACH_LANE(F32x16, a.v[i] < b.v[i] ? then.v[i] : otherwise.v[i])
}
// To nearest even; what does not fit becomes INT32_MIN.
TL_INLINE I32x16 round_to_int(F32x16 a) {
  TL_EACH_LANE(I32x16, a.v[i] >= -0x1p31f && a.v[i] < 0x1p31f
                           ? static_cast<int32_t>(std::nearbyintf(a.v[i]))
                           : INT32_MIN)
}
TL_INLINE F32x16 to_float(I32x16 a) { TL_EACH_LANE(F32x16, static_cast<float>(a.v[i])) }
TL_INLINE I32x16 broadcast_int(int32_t value) { TL_EACH_LANE(I32x16, value) }
TL_INLINE I32x16 operator+(I32x16 a, I32x16 b) {
  TL_EACH_LANE(I32x16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) +
                                            static_cast<uint32_t>(b.v[i])))
}
TL_INLINE I32x16 operator-(I32x16 a, I32x16 b) {
  TL_EACH_LANE(I32x16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) -
                                            static_cast<uint32_t>(b.v[i])))
}
template <int bits>
TL_INLINE I32x16 shift_left(I32x16 a) {
  TL_EACH_LANE(I32x16, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << bits))
}
TL_INLINE F32x16 as_float(I32x16 a) {
  F32x16 result;
  std::memcpy(result.v, a.v, sizeof a.v);
  return result;
}
TL_INLINE I32x16 as_int(F32x16 a) {
  I32x16 result;
  std::memcpy(result.v, a.v, sizeof a.v);
  return result;
}
TL_INLINE I32x16 larger(I32x16 a, I32x16 b) { TL_EACH_LANE(I32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }
TL_INLINE void store_i8(int8_t* p, I32x16 a) {
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(a.v[i]);
}
TL_INLINE void store_int(int32_t* p, I32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
#undef TL_EACH_LANE

#endif

// ---------------------------------------------------------------------------------- made of these

// The first `count` values, and zeros.
TL_INLINE F32x16 load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  alignas(64) float values[kLanes] = {};
  std::memcpy(values, p, static_cast<size_t>(count) * sizeof(float));
  return load(values);
}

TL_INLINE void store_some(float* p, F32x16 a, int64_t count) {
  if (count >= kLanes) return store(p, a);
  alignas(64) float values[kLanes];
  store(values, a);
  std::memcpy(p, values, static_cast<size_t>(count) * sizeof(float));
}

// `sum` adds lane i + lane i + 8, then + 4, + 2, + 1; `largest` takes the larger in the same order,
// so that it is any value if there is a NaN. Of integers the order makes no difference.
#if defined(TL_AVX512) || defined(TL_AVX2)

TL_INLINE float sum_of_8(__m256 a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TL_INLINE float largest_of_8(__m256 a) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
TL_INLINE int32_t sum_of_8(__m256i a) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
TL_INLINE int32_t largest_of_8(__m256i a) {
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

#endif
#if defined(TL_AVX512)

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

#elif defined(TL_AVX2)

TL_INLINE float sum(F32x16 a) { return sum_of_8(_mm256_add_ps(a.lo, a.hi)); }
TL_INLINE float largest(F32x16 a) { return largest_of_8(_mm256_max_ps(a.lo, a.hi)); }
TL_INLINE int32_t sum(I32x16 a) { return sum_of_8(_mm256_add_epi32(a.lo, a.hi)); }
TL_INLINE int32_t largest(I32x16 a) { return largest_of_8(_mm256_max_epi32(a.lo, a.hi)); }

#else

TL_INLINE float sum(F32x16 a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] + a.v[i + half];
  }
  return a.v[0];
}
TL_INLINE float largest(F32x16 a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  }
  return a.v[0];
}
TL_INLINE int32_t sum(I32x16 a) {
  uint32_t result = 0;
  for (int i = 0; i < kLanes; i++) result += static_cast<uint32_t>(a.v[i]);
  return static_cast<int32_t>(result);
}
TL_INLINE int32_t largest(I32x16 a) {
  int32_t result = a.v[0];
  for (int i = 1; i < kLanes; i++) result = a.v[i] > result ? a.v[i] : result;
  return result;
}

#endif

// e^x to about 1 ulp, for x up to 88; 0 below -87. NaN stays NaN. After Cephes' expf (Moshier):
// x = n ln 2 + r, and a polynomial in r.
TL_INLINE F32x16 exp(F32x16 x) {
  const F32x16 lowest = broadcast(-87.0f);
  // Clamped with the bound first: then a NaN comes out as itself.
  const F32x16 clamped = smaller(broadcast(88.0f), larger(broadcast(-88.0f), x));
  const I32x16 n = round_to_int(clamped * broadcast(1.44269504f));
  const F32x16 turns = to_float(n);
  F32x16 r = fma(turns, broadcast(-0.693359375f), clamped);
  r = fma(turns, broadcast(2.12194440e-4f), r);
  F32x16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(r * r, p, r + broadcast(1.0f));
  const F32x16 result = p * as_float(shift_left<23>(n + broadcast_int(127)));
  return select_less(x, lowest, zero(), result);
}

// x / (1 + e^-x).
TL_INLINE F32x16 silu(F32x16 x) {
  // -x below 88, where x is so negative that the result is 0 to all digits that matter.
  return x / (broadcast(1.0f) + exp(zero() - x));
}

}  // namespace tokenline
