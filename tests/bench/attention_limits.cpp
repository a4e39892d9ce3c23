// The limit of a core for attention's arithmetic: fused multiply-adds on registers alone.
// attention.py compiles this with the flags of the build that it measures.
#include "simd.h"

// Operations (a multiplication or an addition is one) that `rounds` rounds did.
extern "C" __attribute__((visibility("default"))) double tl_limit_fma(int64_t rounds) {
  using namespace tokenline;
  constexpr int kSums = 6;
  F32x16 sums[kSums];
  // Different ones: of equal ones the compiler would compute one.
  for (int i = 0; i < kSums; i++) sums[i] = broadcast(static_cast<float>(i));
  const F32x16 a = broadcast(0.5f), b = broadcast(1e-3f);
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 2
    for (int twice = 0; twice < 2; twice++) {
#pragma GCC unroll 6
      for (int i = 0; i < kSums; i++) sums[i] = fma(sums[i], a, b);
    }
  }
  float result = 0;
  for (const F32x16& each : sums) result += sum(each);
  // Never so: it keeps the loop from being left out.
  if (result == 1.5f) return 0;
  return 2.0 * kLanes * kSums * 2 * static_cast<double>(rounds);
}
