// The lanes of simd.h in plain C++, which compilers vectorise as far as the target lets them.
#pragma once

#include "half.h"

namespace tokenline {

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

#undef TL_EACH_LANE

}  // namespace tokenline
