// A tile of a linear layer: a panel's weights times R rows of activations, for every format.
//
// An output is one chain of float operations, in the order of its columns' groups, whatever the
// tile: so a row's result depends neither on the rows that come with it nor on the build.
//
//   quantised   y = fma(dot of integers, scale · x's scale, y); y = fma(minimum, x's sum, y),
//               where with two halves a dot is 255 · that of x's high ones + that of its low ones
//   floats      y = fma(weight, x, y) for each column
#pragma once

#include "linear_dots.h"
#include "panels.h"
#include "quantise.h"
#include "simd.h"

namespace tokenline {

// Rows of quantised activations, from one on, each in so many halves.
template <int halves>
struct QuantisedRows {
  const int8_t* quantised;
  const float* scales;
  const float* sums;
  const int32_t* offsets;  // -128 · Σq of each group, where the build wants these
  int64_t groups;

  QuantisedRows from(int64_t row) const {
    const int64_t place = row * groups;
    return {quantised + halves * place * kGroup, scales + place, sums + place,
            offsets ? offsets + place : nullptr, groups};
  }
};

struct FloatRows {
  const float* values;
  int64_t stride;
  int64_t columns;

  FloatRows from(int64_t row) const { return {values + row * stride, stride, columns}; }
};

// Weights are fetched into the second-level cache before they are read: more loads can be under way
// to it than to the first. How far ahead was found by trial, on an AMD Zen 4: with one row or two,
// which wait for memory only, near enough for the machine's own prefetching to follow.
template <int R>
TL_INLINE void fetch_ahead(const uint8_t* weights, int64_t bytes) {
  constexpr int64_t kDistance = R <= 2 ? 1024 : 8192;
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weights + kDistance + i, 0, 2);
}

// ------------------------------------------------------------------------------------- quantised

// Of each format: `halves` are those of the activations it is multiplied by.
template <int halves>
struct Q4Panels {
  using Rows = QuantisedRows<halves>;
  static constexpr int kHalves = halves, kTileRows = rows_per_tile(halves);
  static constexpr GroupLayout kLayout = group_layout(TL_Q4);
  static constexpr bool kHasMinima = true, kOffsets = false;

  TL_INLINE static F32x16 scale(const uint8_t* group) {
    return load_f16(reinterpret_cast<const uint16_t*>(group));
  }
  TL_INLINE static F32x16 minimum(const uint8_t* group) {
    return load_f16(reinterpret_cast<const uint16_t*>(group) + kPanelRows);
  }
  template <int R>
  TL_INLINE static void add_dots(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
    add_dots_q4(values, x, sums);
  }
};

template <int halves>
struct Q4WidePanels : Q4Panels<halves> {
  static constexpr GroupLayout kLayout = group_layout(TL_Q4_WIDE);

  TL_INLINE static F32x16 scale(const uint8_t* group) {
    return load(reinterpret_cast<const float*>(group));
  }
  TL_INLINE static F32x16 minimum(const uint8_t* group) {
    return load(reinterpret_cast<const float*>(group) + kPanelRows);
  }
};

template <int halves>
struct Q8Panels {
  using Rows = QuantisedRows<halves>;
  static constexpr int kHalves = halves, kTileRows = rows_per_tile(halves);
  static constexpr GroupLayout kLayout = group_layout(TL_Q8);
  static constexpr bool kHasMinima = false, kOffsets = kOffsetsInt8;

  TL_INLINE static F32x16 scale(const uint8_t* group) {
    return load_f16(reinterpret_cast<const uint16_t*>(group));
  }
  TL_INLINE static F32x16 minimum(const uint8_t*) { return zero(); }
  template <int R>
  TL_INLINE static void add_dots(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
    add_dots_q8(values, x, sums);
  }
};

template <class Format, int R>
TL_INLINE void multiply(const uint8_t* panel, const QuantisedRows<Format::kHalves>& x,
                        F32x16 (&products)[R]) {
  constexpr int kHalves = Format::kHalves;
  TL_UNROLL
  for (int r = 0; r < R; r++) products[r] = zero();
  for (int64_t g = 0; g < x.groups; g++) {
    const uint8_t* group = panel + g * Format::kLayout.bytes();
    fetch_ahead<R>(group, Format::kLayout.bytes());
    // Of a row's high halves, and of its low ones; or of its only ones.
    I32x16 sums[kHalves * R];
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      sums[kHalves * r] = broadcast_int(0);
      sums[kHalves * r + kHalves - 1] =
          broadcast_int(Format::kOffsets ? x.offsets[r * x.groups + g] : 0);
    }
    Format::add_dots(group + Format::kLayout.scales,
                     {x.quantised + g * kGroup, x.groups * kGroup}, sums);
    const F32x16 scale = Format::scale(group), minimum = Format::minimum(group);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      const int64_t place = r * x.groups + g;
      const F32x16 both_scales = scale * broadcast(x.scales[place]);
      I32x16 dot = sums[kHalves * r];
      if constexpr (kHalves == 2) dot = times_half_base(dot) + sums[2 * r + 1];
      products[r] = fma(to_float(dot), both_scales, products[r]);
      if (Format::kHasMinima) products[r] = fma(minimum, broadcast(x.sums[place]), products[r]);
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

template <class Format, int R>
TL_INLINE void multiply(const uint8_t* panel, const FloatRows& x, F32x16 (&products)[R]) {
  TL_UNROLL
  for (int r = 0; r < R; r++) products[r] = zero();
  for (int64_t i = 0; i < x.columns; i++) {
    const uint8_t* column = panel + i * Format::kColumnBytes;
    fetch_ahead<R>(column, Format::kColumnBytes);
    const F32x16 weights = Format::weights(column);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      products[r] = fma(weights, broadcast(x.values[r * x.stride + i]), products[r]);
    }
  }
}

}  // namespace tokenline
