// Packed weights: panels of 16 rows, a row per lane, and how to read them back.
//
// Columns are padded to groups of 32 and rows to 16, both with zeros. A quantised panel holds its
// groups' scales first and then their values, each part starting at a multiple of 64 bytes:
//
//   TL_Q4       G × (16 float16 scales, 16 float16 minima), G × 256 bytes of values
//   TL_Q4_WIDE  G × (16 float32 scales, 16 float32 minima), G × 256 bytes of values
//   TL_Q8       G × 16 float16 scales, G × 512 bytes of values
//   floats      for each of the G · 32 columns the 16 rows' values
//
// A group's int8 values lie as 8 quads of columns (0–3, 4–7 …), each 16 rows × 4 bytes, so that one
// instruction multiplies four columns of 16 rows. The 4-bit ones lie as 4 such parts: the low
// halves of part j hold quad 2j, the high ones quad 2j + 1.
#pragma once

#include <cstdint>

#include "api.h"
#include "quantise.h"

namespace tokenline {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kQuadBytes = kPanelRows * 4;
constexpr int64_t kQ4GroupBytes = kPanelRows * kGroup / 2;
constexpr int64_t kQ8GroupBytes = kPanelRows * kGroup;

TL_INLINE int64_t num_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// The sizes of a panel's two parts, in bytes.
struct PanelLayout {
  int64_t scales;
  int64_t values;

  int64_t bytes() const { return scales + values; }
};

// Of a format of api.h.
PanelLayout panel_layout(int32_t format, int64_t columns);

// Row `row` of the matrix, dequantised, float32 [columns].
void unpack_row(const TlMatrix& matrix, int64_t row, float* out);

}  // namespace tokenline
