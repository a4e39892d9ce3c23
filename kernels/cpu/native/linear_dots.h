// Integer dot products of a group of 32 columns: panels' weights times rows of activations.
//
// The only part of a linear layer that is written per instruction set: sums of integers are exact,
// so that every way to them gives the same bits. Each build says how much of it fits registers:
//
//   rows_per_tile     rows that share one read of the weights, by the halves of their activations
//   kOffsetsInt8      int8 weights are taken as unsigned, w + 128; the sums start at -128 · Σx
//
// `sums` come as what the dot products are to be added to: zeros, but for kOffsetsInt8.
#pragma once

#include "panels.h"
#include "simd.h"

#if defined(TL_NEON)
#include <arm_neon.h>
#endif

// Loops over registers, which must be gone before the compiler allots these.
#define TL_UNROLL _Pragma("GCC unroll 16")

namespace tokenline {

// Where rows lie that are `stride` bytes apart, by three registers for all arrays with that stride.
// Left to itself, the compiler keeps a pointer to each row of each array, most of them in memory:
// int8 weights times 16 rows then took a quarter longer on AVX-512. The four rows of other builds' tiles
// are a tenth faster so.
class Strides {
 public:
  TL_INLINE explicit Strides(int64_t stride) : one_(stride), three_(3 * stride), four_(4 * stride) {}

  // The same, unknown to the compiler, so that nothing is worked out of it before this round of a loop.
  TL_INLINE Strides in_this_round() const {
    Strides copy = *this;
#if defined(TL_AVX512)
    asm volatile("" : "+r"(copy.one_), "+r"(copy.three_), "+r"(copy.four_));
#endif
    return copy;
  }

  template <class T>
  TL_INLINE const T* from(const T* first, int row) const {
    const auto* p = reinterpret_cast<const char*>(first);
    for (; row >= 4; row -= 4) p += four_;
    p += row == 3 ? three_ : row * one_;
    return reinterpret_cast<const T*>(p);
  }

 private:
  int64_t one_, three_, four_;
};

// Rows of a group's activations.
struct GroupRows {
  const int8_t* first;
  const Strides& strides;

  TL_INLINE const int8_t* quad(int row, int quad) const {
    return strides.from(first, row) + quad * 4;
  }
};

#if defined(TL_AVX512)

constexpr int rows_per_tile(int /*halves*/) { return 8; }
constexpr int kFloatRowsPerTile = 8;
constexpr bool kOffsetsInt8 = true;

TL_INLINE __m512i broadcast_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}

template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m512i low_halves = _mm512_set1_epi8(15);
  TL_UNROLL
  for (int part = 0; part < 4; part++) {
    const __m512i both = _mm512_loadu_si512(values + part * kQuadBytes);
    const __m512i even = _mm512_and_si512(both, low_halves);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_halves);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      sums[r].v = _mm512_dpbusd_epi32(sums[r].v, even, broadcast_quad(x.quad(r, 2 * part)));
      sums[r].v = _mm512_dpbusd_epi32(sums[r].v, odd, broadcast_quad(x.quad(r, 2 * part + 1)));
    }
  }
}

template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  const __m512i offset = _mm512_set1_epi8(-128);
  TL_UNROLL
  for (int quad = 0; quad < 8; quad++) {
    const __m512i stored = _mm512_loadu_si512(values + quad * kQuadBytes);
    const __m512i weights = _mm512_xor_si512(stored, offset);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      sums[r].v = _mm512_dpbusd_epi32(sums[r].v, weights, broadcast_quad(x.quad(r, quad)));
    }
  }
}

#elif defined(TL_AVX2)

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

#elif defined(TL_NEON)

constexpr int rows_per_tile(int halves) { return 4 / halves; }
constexpr int kFloatRowsPerTile = 4;
constexpr bool kOffsetsInt8 = false;

TL_INLINE int8x16_t broadcast_quad(const int8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}

// Four lanes' quads at a time.
template <int R, class Load>
TL_INLINE void add_dots(GroupRows x, I32x16 (&sums)[R], Load load_quads) {
  TL_UNROLL
  for (int lanes = 0; lanes < 4; lanes++) {
    int32x4_t four[R];
    TL_UNROLL
    for (int r = 0; r < R; r++) four[r] = vdupq_n_s32(0);
    TL_UNROLL
    for (int part = 0; part < 4; part++) {
      int8x16_t even, odd;
      load_quads(part, lanes, &even, &odd);
      TL_UNROLL
      for (int r = 0; r < R; r++) {
        four[r] = vdotq_s32(four[r], even, broadcast_quad(x.quad(r, 2 * part)));
        four[r] = vdotq_s32(four[r], odd, broadcast_quad(x.quad(r, 2 * part + 1)));
      }
    }
    TL_UNROLL
    for (int r = 0; r < R; r++) vst1q_s32(sums[r].v + lanes * 4, four[r]);
  }
}

template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  add_dots(x, sums, [&](int part, int lanes, int8x16_t* even, int8x16_t* odd) {
    const uint8x16_t both = vld1q_u8(values + part * kQuadBytes + lanes * 16);
    *even = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    *odd = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  });
}

template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  add_dots(x, sums, [&](int part, int lanes, int8x16_t* even, int8x16_t* odd) {
    const uint8_t* place = values + 2 * part * kQuadBytes + lanes * 16;
    *even = vreinterpretq_s8_u8(vld1q_u8(place));
    *odd = vreinterpretq_s8_u8(vld1q_u8(place + kQuadBytes));
  });
}

#else

constexpr int rows_per_tile(int halves) { return 4 / halves; }
constexpr int kFloatRowsPerTile = 2;
constexpr bool kOffsetsInt8 = false;

// Adds `num_quads` quads, whose products' sums fit into 16 bits.
template <int num_quads, int R>
TL_INLINE void add_quads(const int8_t* weights, GroupRows x, int first_quad,
                         I32x16 (&sums)[R]) {
  for (int r = 0; r < R; r++) {
    int16_t columns[kQuadBytes] = {};
    for (int quad = 0; quad < num_quads; quad++) {
      int16_t two[8];  // the quad twice: as many lanes as the smallest vectors have
      for (int i = 0; i < 8; i++) two[i] = x.quad(r, first_quad + quad)[i % 4];
      const int8_t* w = weights + quad * kQuadBytes;
      for (int i = 0; i < kQuadBytes; i += 8) {
        for (int k = 0; k < 8; k++) {
          columns[i + k] = static_cast<int16_t>(columns[i + k] + w[i + k] * two[k]);
        }
      }
    }
    for (int lane = 0; lane < kLanes; lane++) {
      const int16_t* four = columns + lane * 4;
      sums[r].v[lane] += four[0] + four[1] + four[2] + four[3];
    }
  }
}

template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  int8_t quads[kPanelRows * kGroup];
  for (int part = 0; part < 4; part++) {
    for (int i = 0; i < kQuadBytes; i++) {
      const uint8_t both = values[part * kQuadBytes + i];
      quads[2 * part * kQuadBytes + i] = static_cast<int8_t>(both & 15);
      quads[(2 * part + 1) * kQuadBytes + i] = static_cast<int8_t>(both >> 4);
    }
  }
  add_quads<8>(quads, x, 0, sums);
}

template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  for (int quad = 0; quad < 8; quad += 2) {
    const auto* weights = reinterpret_cast<const int8_t*>(values + quad * kQuadBytes);
    add_quads<2>(weights, x, quad, sums);
  }
}

#endif

}  // namespace tokenline
