// A core's limits for linear layers: their instructions on registers alone, and reading memory.
//
// What a linear layer needs for each product, and nothing else: no loads, no broadcasts, no loops
// over rows. kernels.py compiles this with the flags of the build that it measures.
#include "simd.h"

#define TL_API extern "C" __attribute__((visibility("default")))
#define TL_UNROLL _Pragma("GCC unroll 16")

namespace tokenline {
namespace {

// Each group of 32 columns: two dot products of integers, with the halves of the activations (4-bit
// weights unpacked once for all rows of a tile), their sum to float, scale · scale, fma, and for a
// minimum one more fma.
enum Mix { kDotsAlone = 0, kQ4 = 1, kQ8 = 2 };

#if defined(TL_AVX512)

using Floats = __m512;
using Bytes = __m512i;
// As in the kernels' tiles.
constexpr int kVectors = 1;  // of 16 outputs
constexpr int kRows = 8;

TL_INLINE Bytes unpack_low(Bytes both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
TL_INLINE Bytes shift(Bytes both) { return _mm512_srli_epi16(both, 4); }
TL_INLINE Bytes offset(Bytes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
TL_INLINE Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
TL_INLINE Floats add_product(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

struct Sums {
  Bytes v = _mm512_setzero_si512();
  TL_INLINE void add(Bytes w, Bytes x, Mix) { v = _mm512_dpbusd_epi32(v, w, x); }
  // 255 · these, the high halves, and the low ones.
  TL_INLINE Floats floats(const Sums& low, Mix) const {
    const Bytes high = _mm512_sub_epi32(_mm512_slli_epi32(v, 8), v);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(high, low.v));
  }
};

#elif defined(TL_AVX2)

using Floats = __m256;
using Bytes = __m256i;
// Twice the rows of a tile: with these alone, the sums would wait for each other.
constexpr int kVectors = 1;  // of 8 outputs
constexpr int kRows = 4;

TL_INLINE Bytes unpack_low(Bytes both) { return _mm256_and_si256(both, _mm256_set1_epi8(15)); }
TL_INLINE Bytes shift(Bytes both) { return _mm256_srli_epi16(both, 4); }
TL_INLINE Bytes offset(Bytes w) { return _mm256_abs_epi8(w); }
TL_INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
TL_INLINE Floats add_product(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// Pairs in 16 bits for 4-bit weights, fours in 32 bits for int8.
struct Sums {
  Bytes v = _mm256_setzero_si256();
  TL_INLINE void add(Bytes w, Bytes x, Mix mix) {
    if (mix == kQ8) {
      const Bytes pairs = _mm256_maddubs_epi16(w, _mm256_sign_epi8(x, w));
      v = _mm256_add_epi32(v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    } else {
      v = _mm256_add_epi16(v, _mm256_maddubs_epi16(w, x));
    }
  }
  TL_INLINE Bytes whole(Mix mix) const {
    return mix == kQ8 ? v : _mm256_madd_epi16(v, _mm256_set1_epi16(1));
  }
  // 255 · these, the high halves, and the low ones.
  TL_INLINE Floats floats(const Sums& low, Mix mix) const {
    const Bytes a = whole(mix), high = _mm256_sub_epi32(_mm256_slli_epi32(a, 8), a);
    return _mm256_cvtepi32_ps(_mm256_add_epi32(high, low.whole(mix)));
  }
};

#else
#define TL_NO_LIMIT
#endif

#ifndef TL_NO_LIMIT

// The compiler must take it for another value than before.
template <class V>
TL_INLINE void renew(V& value) {
  asm volatile("" : "+v"(value));
}

template <Mix mix>
TL_INLINE void multiply_group(Bytes (&weights)[kVectors], Bytes& x, Floats& scale,
                              Floats (&products)[kVectors][kRows]) {
  Sums sums[kVectors][2 * kRows];
  TL_UNROLL
  for (int part = 0; part < 4; part++) {
    Bytes even[kVectors], odd[kVectors];
    TL_UNROLL
    for (int p = 0; p < kVectors; p++) {
      renew(weights[p]);
      even[p] = mix == kDotsAlone ? weights[p] : mix == kQ4 ? unpack_low(weights[p])
                                                            : offset(weights[p]);
      if (mix != kQ4) renew(weights[p]);
      odd[p] = mix == kDotsAlone ? weights[p] : mix == kQ4 ? unpack_low(shift(weights[p]))
                                                           : offset(weights[p]);
    }
    TL_UNROLL
    for (int r = 0; r < 2 * kRows; r++) {
      renew(x);
      TL_UNROLL
      for (int p = 0; p < kVectors; p++) {
        sums[p][r].add(even[p], x, mix);
        sums[p][r].add(odd[p], x, mix);
      }
    }
  }
  TL_UNROLL
  for (int p = 0; p < kVectors; p++) {
    TL_UNROLL
    for (int r = 0; r < kRows; r++) {
      renew(sums[p][2 * r].v);
      renew(sums[p][2 * r + 1].v);
      if (mix == kDotsAlone) continue;
      renew(scale);
      const Floats dot = sums[p][2 * r].floats(sums[p][2 * r + 1], mix);
      products[p][r] = add_product(dot, times(scale, scale), products[p][r]);
      if (mix == kQ4) products[p][r] = add_product(scale, scale, products[p][r]);
    }
  }
}

template <Mix mix>
double multiply(int64_t rounds) {
  Bytes weights[kVectors] = {}, x = {};
  Floats scale = {}, products[kVectors][kRows] = {};
  for (int64_t round = 0; round < rounds; round++) {
    multiply_group<mix>(weights, x, scale, products);
  }
  TL_UNROLL
  for (int p = 0; p < kVectors; p++) {
    TL_UNROLL
    for (int r = 0; r < kRows; r++) renew(products[p][r]);
  }
  const int outputs = static_cast<int>(sizeof(Floats) / sizeof(float)) * kVectors;
  return 2.0 * 32 * outputs * kRows * static_cast<double>(rounds);
}

#endif

}  // namespace
}  // namespace tokenline

// Operations (a multiplication or an addition is one) that `rounds` rounds did; 0: no loop for it.
TL_API double tl_limit_operations(int32_t mix, int64_t rounds) {
#ifdef TL_NO_LIMIT
  (void)mix, (void)rounds;
  return 0.0;
#else
  using namespace tokenline;
  if (mix == kQ4) return multiply<kQ4>(rounds);
  return mix == kQ8 ? multiply<kQ8>(rounds) : multiply<kDotsAlone>(rounds);
#endif
}

// Reads `count` floats, a multiple of 64.
TL_API float tl_limit_read(const float* values, int64_t count) {
  using namespace tokenline;
  F32x16 sums[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < count; i += 4 * kLanes) {
    for (int part = 0; part < 4; part++) {
      __builtin_prefetch(values + i + part * kLanes + 1024);
      sums[part] = sums[part] + load(values + i + part * kLanes);
    }
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
