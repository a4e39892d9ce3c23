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

  // Of the loop along a row.
  int64_t steps() const { return groups; }
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

  int64_t steps() const { return columns; }
  FloatRows from(int64_t row) const { return {values + row * stride, stride, columns}; }
};

// Weights to be fetched meanwhile into the second-level cache, so many bytes in each step: more loads
// can be under way to it than to the first.
struct Ahead {
  const uint8_t* from;
  int64_t bytes;

  TL_INLINE void fetch(int64_t step) const {
    const uint8_t* first = from + step * bytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i, 0, 2);
  }
};

// ------------------------------------------------------------------------------------- quantised

// Of each format: `halves` are those of the activations it is multiplied by.
template <int halves>
struct Q4Panels {
  using Rows = QuantisedRows<halves>;
  static constexpr int kHalves = halves, kTileRows = rows_per_tile(halves);
  static constexpr GroupLayout kLayout = group_layout(TL_Q4);
  static constexpr int64_t kStepBytes = kLayout.bytes();
  static constexpr bool kIsQuantised = true, kIs4Bit = true, kHasMinima = true, kOffsets = false;

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
  static constexpr int64_t kStepBytes = kLayout.bytes();

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
  static constexpr int64_t kStepBytes = kLayout.bytes();
  static constexpr bool kIsQuantised = true, kIs4Bit = false, kHasMinima = false;
  static constexpr bool kOffsets = kOffsetsInt8;

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
TL_INLINE void multiply(const uint8_t* panel, const QuantisedRows<Format::kHalves>& x, Ahead ahead,
                        F32x16 (&products)[R]) {
  constexpr int kHalves = Format::kHalves;
  TL_UNROLL
  for (int r = 0; r < R; r++) products[r] = zero();
  const Strides to_quantised(x.groups * kGroup), to_floats(x.groups * 4);
  for (int64_t g = 0; g < x.groups; g++) {
    const Strides quantised = to_quantised.in_this_round(), floats = to_floats.in_this_round();
    const uint8_t* group = panel + g * Format::kStepBytes;
    ahead.fetch(g);
    // Of a row's high halves, and of its low ones; or of its only ones.
    I32x16 sums[kHalves * R];
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      sums[kHalves * r] = broadcast_int(0);
      sums[kHalves * r + kHalves - 1] =
          broadcast_int(Format::kOffsets ? *floats.from(x.offsets + g, r) : 0);
    }
    Format::add_dots(group + Format::kLayout.scales, {x.quantised + g * kGroup, quantised}, sums);
    const F32x16 scale = Format::scale(group), minimum = Format::minimum(group);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      const F32x16 both_scales = scale * broadcast(*floats.from(x.scales + g, r));
      I32x16 dot = sums[kHalves * r];
      if constexpr (kHalves == 2) dot = times_half_base(dot) + sums[2 * r + 1];
      products[r] = fma(to_float(dot), both_scales, products[r]);
      if (Format::kHasMinima) {
        products[r] = fma(minimum, broadcast(*floats.from(x.sums + g, r)), products[r]);
      }
    }
  }
}

// ----------------------------------------------------------------------------------------- floats

struct FloatPanels {
  using Rows = FloatRows;
  static constexpr int kTileRows = kFloatRowsPerTile;
  static constexpr bool kIsQuantised = false, kOffsets = false;
};

struct F32Panels : FloatPanels {
  static constexpr int64_t kStepBytes = kPanelRows * 4;
  TL_INLINE static F32x16 weights(const uint8_t* column) {
    return load(reinterpret_cast<const float*>(column));
  }
};

struct F16Panels : FloatPanels {
  static constexpr int64_t kStepBytes = kPanelRows * 2;
  TL_INLINE static F32x16 weights(const uint8_t* column) {
    return load_f16(reinterpret_cast<const uint16_t*>(column));
  }
};

struct Bf16Panels : FloatPanels {
  static constexpr int64_t kStepBytes = kPanelRows * 2;
  TL_INLINE static F32x16 weights(const uint8_t* column) {
    return load_bf16(reinterpret_cast<const uint16_t*>(column));
  }
};

template <class Format, int R>
TL_INLINE void multiply(const uint8_t* panel, const FloatRows& x, Ahead ahead,
                        F32x16 (&products)[R]) {
  TL_UNROLL
  for (int r = 0; r < R; r++) products[r] = zero();
  for (int64_t i = 0; i < x.columns; i++) {
    const uint8_t* column = panel + i * Format::kStepBytes;
    ahead.fetch(i);
    const F32x16 weights = Format::weights(column);
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      products[r] = fma(weights, broadcast(x.values[r * x.stride + i]), products[r]);
    }
  }
}

}  // namespace tokenline
