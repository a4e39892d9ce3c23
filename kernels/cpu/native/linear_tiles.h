// A tile of a linear layer: P panels' weights times R rows of activations, for every format.
//
// An output is one chain of float operations, in the order of its columns' groups, whatever the
// tile: so a row's result depends neither on the rows that come with it nor on the build.
//
//   quantised   y = fma(dot of integers, scale · x's scale, y); y = fma(minimum, x's sum, y)
//   floats      y = fma(weight, x, y) for each column
#pragma once

#include "linear_dots.h"
#include "panels.h"
#include "simd.h"

namespace tokenline {

// Where a tile's weights lie. `ahead` is how many bytes further those of the next tile begin, which
// are fetched on the way (0: nothing is).
template <int P>
struct Panels {
  const uint8_t* scales[P];
  const uint8_t* values[P];
  int64_t ahead;
};

// Rows of quantised activations, from one on.
struct QuantisedRows {
  const int8_t* quantised;
  const float* scales;
  const float* sums;
  const int32_t* offsets;  // -128 · Σq of each group, where the build wants these
  int64_t groups;

  QuantisedRows from(int64_t row) const {
    const int64_t place = row * groups;
    return {quantised + place * kGroup, scales + place, sums + place,
            offsets ? offsets + place : nullptr, groups};
  }
};

struct FloatRows {
  const float* values;
  int64_t stride;
  int64_t columns;

  FloatRows from(int64_t row) const { return {values + row * stride, stride, columns}; }
};

TL_INLINE void prefetch_lines(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

// ------------------------------------------------------------------------------------- quantised

struct Q4Panels {
  using Rows = QuantisedRows;
  static constexpr int kTileRows = kRowsPerTile;
  static constexpr int64_t kScaleBytes = kPanelRows * 4, kValueBytes = kQ4GroupBytes;
  static constexpr bool kHasMinima = true, kOffsets = false;

  TL_INLINE static F32x16 scale(const uint8_t* group) {
    return load_f16(reinterpret_cast<const uint16_t*>(group));
  }
  TL_INLINE static F32x16 minimum(const uint8_t* group) {
    return load_f16(reinterpret_cast<const uint16_t*>(group) + kPanelRows);
  }
  template <int P, int R>
  TL_INLINE static void add_dots(const uint8_t* const (&values)[P], GroupRows x,
                                 I32x16 (&sums)[P][R]) {
    add_dots_q4(values, x, sums);
  }
};

struct Q4WidePanels : Q4Panels {
  static constexpr int64_t kScaleBytes = kPanelRows * 8;

  TL_INLINE static F32x16 scale(const uint8_t* group) {
    return load(reinterpret_cast<const float*>(group));
  }
  TL_INLINE static F32x16 minimum(const uint8_t* group) {
    return load(reinterpret_cast<const float*>(group) + kPanelRows);
  }
};

struct Q8Panels {
  using Rows = QuantisedRows;
  static constexpr int kTileRows = kRowsPerTile;
  static constexpr int64_t kScaleBytes = kPanelRows * 2, kValueBytes = kQ8GroupBytes;
  static constexpr bool kHasMinima = false, kOffsets = kOffsetsInt8;

  TL_INLINE static F32x16 scale(const uint8_t* group) {
    return load_f16(reinterpret_cast<const uint16_t*>(group));
  }
  TL_INLINE static F32x16 minimum(const uint8_t*) { return zero(); }
  template <int P, int R>
  TL_INLINE static void add_dots(const uint8_t* const (&values)[P], GroupRows x,
                                 I32x16 (&sums)[P][R]) {
    add_dots_q8(values, x, sums);
  }
};

// Group `g` of panels [first, first + N) of the tile.
template <class Format, int N, int P, int R>
TL_INLINE void multiply_group(const Panels<P>& panels, int first, int64_t g,
                              const QuantisedRows& x, F32x16 (&products)[P][R]) {
  const uint8_t* values[N];
  I32x16 sums[N][R];
  TL_UNROLL
  for (int p = 0; p < N; p++) {
    values[p] = panels.values[first + p] + g * Format::kValueBytes;
    prefetch_lines(values[p] + panels.ahead, Format::kValueBytes);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      sums[p][r] = broadcast_int(Format::kOffsets ? x.offsets[r * x.groups + g] : 0);
    }
  }
  Format::add_dots(values, {x.quantised + g * kGroup, x.groups * kGroup}, sums);
  TL_UNROLL
  for (int p = 0; p < N; p++) {
    const uint8_t* scales = panels.scales[first + p] + g * Format::kScaleBytes;
    prefetch_lines(scales + panels.ahead, Format::kScaleBytes);
    const F32x16 scale = Format::scale(scales), minimum = Format::minimum(scales);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      F32x16& product = products[first + p][r];
      const F32x16 both_scales = scale * broadcast(x.scales[r * x.groups + g]);
      product = fma(to_float(sums[p][r]), both_scales, product);
      if (Format::kHasMinima) {
        product = fma(minimum, broadcast(x.sums[r * x.groups + g]), product);
      }
    }
  }
}

template <class Format, int P, int R>
TL_INLINE void multiply(const Panels<P>& panels, const QuantisedRows& x,
                        F32x16 (&products)[P][R]) {
  constexpr int kAtOnce = kPanelsAtOnce < P ? kPanelsAtOnce : P;
  static_assert(P % kAtOnce == 0, "a tile is so many panels, several times");
  TL_UNROLL
  for (int p = 0; p < P; p++) {
    TL_UNROLL
    for (int r = 0; r < R; r++) products[p][r] = zero();
  }
  for (int64_t g = 0; g < x.groups; g++) {
    TL_UNROLL
    for (int p = 0; p < P; p += kAtOnce) {
      multiply_group<Format, kAtOnce>(panels, p, g, x, products);
    }
  }
}

// ----------------------------------------------------------------------------------------- floats

struct FloatPanels {
  using Rows = FloatRows;
  static constexpr int kTileRows = kFloatRowsPerTile;
  static constexpr bool kOffsets = false;
};

struct F32Panels : FloatPanels {
  static constexpr int64_t kColumnBytes = kPanelRows * 4;
  TL_INLINE static F32x16 weights(const uint8_t* column) {
    return load(reinterpret_cast<const float*>(column));
  }
};

struct F16Panels : FloatPanels {
  static constexpr int64_t kColumnBytes = kPanelRows * 2;
  TL_INLINE static F32x16 weights(const uint8_t* column) {
    return load_f16(reinterpret_cast<const uint16_t*>(column));
  }
};

struct Bf16Panels : FloatPanels {
  static constexpr int64_t kColumnBytes = kPanelRows * 2;
  TL_INLINE static F32x16 weights(const uint8_t* column) {
    return load_bf16(reinterpret_cast<const uint16_t*>(column));
  }
};

template <class Format, int P, int R>
TL_INLINE void multiply(const Panels<P>& panels, const FloatRows& x, F32x16 (&products)[P][R]) {
  constexpr int kAtOnce = kPanelsAtOnce < P ? kPanelsAtOnce : P;
  TL_UNROLL
  for (int first = 0; first < P; first += kAtOnce) {
    F32x16 sums[kAtOnce][R];
    TL_UNROLL
    for (int p = 0; p < kAtOnce; p++) {
      TL_UNROLL
      for (int r = 0; r < R; r++) sums[p][r] = zero();
    }
    for (int64_t i = 0; i < x.columns; i++) {
      F32x16 weights[kAtOnce];
      TL_UNROLL
      for (int p = 0; p < kAtOnce; p++) {
        const uint8_t* column = panels.values[first + p] + i * Format::kColumnBytes;
        __builtin_prefetch(column + panels.ahead);
        weights[p] = Format::weights(column);
      }
      TL_UNROLL
      for (int r = 0; r < R; r++) {
        const F32x16 value = broadcast(x.values[r * x.stride + i]);
        TL_UNROLL
        for (int p = 0; p < kAtOnce; p++) sums[p][r] = fma(weights[p], value, sums[p][r]);
      }
    }
    TL_UNROLL
    for (int p = 0; p < kAtOnce; p++) {
      TL_UNROLL
      for (int r = 0; r < R; r++) products[first + p][r] = sums[p][r];
    }
  }
}

}  // namespace tokenline
