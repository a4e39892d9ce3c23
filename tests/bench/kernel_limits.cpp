// A core's limits for linear layers: their instructions on registers alone, and reading memory.
//
// What a linear layer needs for each product, and nothing else: no loads, no broadcasts, no loops
// over rows. AMX gives dot products to memory only, so that its loop has that way in it. kernels.py
// compiles this with the flags of the build that it measures.
#include "linear_amx.h"
#include "simd.h"

#define TL_API extern "C" __attribute__((visibility("default")))
#define TL_UNROLL _Pragma("GCC unroll 16")

namespace tokenline {
namespace {

// Each group of 32 columns: a dot product of integers with each half of the activations (4-bit weights
// unpacked once for all rows of a tile), their sum to float, scale · scale, fma, and for a minimum one
// more fma.
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
TL_INLINE Floats to_floats(Bytes sums) { return _mm512_cvtepi32_ps(sums); }
// 255 · a + b.
TL_INLINE Bytes join(Bytes a, Bytes b) {
  return _mm512_add_epi32(_mm512_sub_epi32(_mm512_slli_epi32(a, 8), a), b);
}

struct Sums {
  Bytes v = _mm512_setzero_si512();
  TL_INLINE void add(Bytes w, Bytes x, Mix) { v = _mm512_dpbusd_epi32(v, w, x); }
  TL_INLINE Bytes whole(Mix) const { return v; }
};

#elif defined(TL_AVX2)

using Floats = __m256;
using Bytes = __m256i;
// As many as give sums that do not wait for each other, whatever a tile has.
constexpr int kVectors = 1;  // of 8 outputs
constexpr int kRows = 4;

TL_INLINE Bytes unpack_low(Bytes both) { return _mm256_and_si256(both, _mm256_set1_epi8(15)); }
TL_INLINE Bytes shift(Bytes both) { return _mm256_srli_epi16(both, 4); }
TL_INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
TL_INLINE Floats add_product(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
TL_INLINE Floats to_floats(Bytes sums) { return _mm256_cvtepi32_ps(sums); }
// 255 · a + b.
TL_INLINE Bytes join(Bytes a, Bytes b) {
  return _mm256_add_epi32(_mm256_sub_epi32(_mm256_slli_epi32(a, 8), a), b);
}

#if defined(TL_AVXVNNI)

TL_INLINE Bytes offset(Bytes w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }

struct Sums {
  Bytes v = _mm256_setzero_si256();
  TL_INLINE void add(Bytes w, Bytes x, Mix) { v = _mm256_dpbusd_avx_epi32(v, w, x); }
  TL_INLINE Bytes whole(Mix) const { return v; }
};

#else

TL_INLINE Bytes offset(Bytes w) { return _mm256_abs_epi8(w); }

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
};

#endif  // TL_AVXVNNI

#else
#define TL_NO_LIMIT
#endif

#ifndef TL_NO_LIMIT

// The compiler must take it for another value than before.
template <class V>
TL_INLINE void renew(V& value) {
  asm volatile("" : "+v"(value));
}

template <Mix mix, int halves>
TL_INLINE void multiply_group(Bytes (&weights)[kVectors], Bytes& x, Floats& scale,
                              Floats (&products)[kVectors][kRows]) {
  Sums sums[kVectors][halves * kRows];
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
    for (int r = 0; r < halves * kRows; r++) {
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
      const Sums* halves_sums = sums[p] + halves * r;
      renew(sums[p][halves * r].v);
      renew(sums[p][halves * r + halves - 1].v);
      if (mix == kDotsAlone) continue;
      renew(scale);
      Bytes whole = halves_sums[0].whole(mix);
      if constexpr (halves == 2) whole = join(whole, halves_sums[1].whole(mix));
      const Floats dot = to_floats(whole);
      products[p][r] = add_product(dot, times(scale, scale), products[p][r]);
      if (mix == kQ4) products[p][r] = add_product(scale, scale, products[p][r]);
    }
  }
}

template <Mix mix, int halves>
double run(int64_t rounds) {
  Bytes weights[kVectors] = {}, x = {};
  Floats scale = {}, products[kVectors][kRows] = {};
  for (int64_t round = 0; round < rounds; round++) {
    multiply_group<mix, halves>(weights, x, scale, products);
  }
  TL_UNROLL
  for (int p = 0; p < kVectors; p++) {
    TL_UNROLL
    for (int r = 0; r < kRows; r++) renew(products[p][r]);
  }
  const int outputs = static_cast<int>(sizeof(Floats) / sizeof(float)) * kVectors;
  return 2.0 * 32 * outputs * kRows * static_cast<double>(rounds);
}

#if defined(TL_AMX)

// The dot products of a batch of groups, then their floats, as in the kernels.
constexpr int kBatch = 12;

template <Mix mix, int halves>
double run_tiles(int64_t rounds) {
  alignas(64) static const int8_t operands[16 * kQuadBytes] = {};
  const TileRegisters registers(kTileRegisterRows);
  tile_load<Tile::kWeights>(operands, kQuadBytes);
  tile_load<Tile::kRows>(operands, kGroup);
  alignas(64) int32_t dots[kBatch][halves][kTileRegisterRows * kPanelRows];
  F32x16 scale = zero(), products[kTileRegisterRows] = {};
  for (int64_t round = 0; round < rounds; round++) {
    for (int group = 0; group < kBatch; group++) {
      for (int half = 0; half < halves; half++) {
        tile_zero<Tile::kDots>();
        tile_multiply<Tile::kDots, Tile::kRows>();
        if (mix != kDotsAlone) tile_store<Tile::kDots>(dots[group][half], kPanelRows * 4);
      }
    }
    for (int group = 0; mix != kDotsAlone && group < kBatch; group++) {
      TL_UNROLL
      for (int r = 0; r < kTileRegisterRows; r++) {
        asm volatile("" : "+v"(scale.v));
        I32x16 dot = load_dots(dots[group][0], r);
        if constexpr (halves == 2) dot = times_half_base(dot) + load_dots(dots[group][1], r);
        products[r] = fma(to_float(dot), scale * scale, products[r]);
        if (mix == kQ4) products[r] = fma(scale, scale, products[r]);
      }
    }
  }
  TL_UNROLL
  for (int r = 0; r < kTileRegisterRows; r++) asm volatile("" : : "v"(products[r].v));
  return 2.0 * kGroup * kPanelRows * kTileRegisterRows * kBatch * static_cast<double>(rounds);
}

#endif

template <Mix mix, int halves>
double run_rows(int64_t num_rows, int64_t rounds) {
#if defined(TL_AMX)
  if (num_rows >= fewest_tile_rows(mix == kQ4)) return run_tiles<mix, halves>(rounds);
#endif
  (void)num_rows;
  return run<mix, halves>(rounds);
}

template <int halves>
double run(int32_t mix, int64_t num_rows, int64_t rounds) {
  if (mix == kQ4) return run_rows<kQ4, halves>(num_rows, rounds);
  if (mix == kQ8) return run_rows<kQ8, halves>(num_rows, rounds);
  return run_rows<kDotsAlone, halves>(num_rows, rounds);
}

#endif

}  // namespace
}  // namespace tokenline

// Operations (a multiplication or an addition is one) that `rounds` rounds did, of the instructions
// that so many rows are multiplied with; 0: no loop for it.
TL_API double tl_limit_operations(int32_t mix, int32_t halves, int64_t num_rows, int64_t rounds) {
#ifdef TL_NO_LIMIT
  (void)mix, (void)halves, (void)num_rows, (void)rounds;
  return 0.0;
#else
  return halves == 1 ? tokenline::run<1>(mix, num_rows, rounds)
                     : tokenline::run<2>(mix, num_rows, rounds);
#endif
}

// Reads `count` floats, a multiple of 64, that are fetched ahead into the first-level cache or the
// second. Which is faster depends on the machine.
template <int into>
float read(const float* values, int64_t count) {
  using namespace tokenline;
  F32x16 sums[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < count; i += 4 * kLanes) {
    for (int part = 0; part < 4; part++) {
      __builtin_prefetch(values + i + part * kLanes + 1024, 0, into == 1 ? 3 : 2);
      sums[part] = sums[part] + load(values + i + part * kLanes);
    }
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

TL_API float tl_limit_read(const float* values, int64_t count, int32_t into) {
  return into == 1 ? read<1>(values, count) : read<2>(values, count);
}
