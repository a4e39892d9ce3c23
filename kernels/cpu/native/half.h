// Numbers of half precision, one at a time; and what all headers of kernels share.
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

}  // namespace tokenline
