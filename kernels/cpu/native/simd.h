// Sixteen lanes of floats and integers: the same bits on every instruction set.
//
// Every function is one IEEE operation per lane (fma rounds once), whatever it is made of, and
// reductions add in one fixed tree: `sum` adds lane i + lane i + 8, then + 4, + 2, + 1; `largest`
// takes the larger in the same order, so that it is any value if there is a NaN. Kernels keep a
// value per lane and cross lanes only through these two, so that their results do not depend on how
// wide the machine's vectors are. -ffp-contract=off keeps compilers from fusing what is not written
// as fma.
#pragma once

#if defined(TL_AVX512)
#include "simd_avx512.h"
#elif defined(TL_AVX2)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

namespace tokenline {

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
