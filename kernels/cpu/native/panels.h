// Packed weights: panels of 16 rows, a row per lane, and how to read them back.
//
// Columns are padded to groups of 32 and rows to 16, both with zeros. A panel lies in memory as it
// is read, group by group, and then the next panel, so that the machine foresees what comes next:
//
//   TL_Q4       16 float16 scales, 16 float16 minima, 256 bytes of values
//   TL_Q4_WIDE  16 float32 scales, 16 float32 minima, 256 bytes of values
//   TL_Q8       16 float16 scales, 512 bytes of values
//   floats      for each of the 32 columns the 16 rows' values
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

TL_INLINE int64_t num_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// A group of a panel: the bytes of its scales and minima, which come first, and of its values.
struct GroupLayout {
  int64_t scales;
  int64_t values;

  constexpr int64_t bytes() const { return scales + values; }
};

// Of a format of api.h.
constexpr GroupLayout group_layout(int32_t format) {
  switch (format) {
    case TL_Q4:
      return {kPanelRows * 4, kPanelRows * kGroup / 2};
    case TL_Q4_WIDE:
      return {kPanelRows * 8, kPanelRows * kGroup / 2};
    case TL_Q8:
      return {kPanelRows * 2, kPanelRows * kGroup};
    case TL_F32:
      return {0, kPanelRows * kGroup * 4};
    default:
      return {0, kPanelRows * kGroup * 2};
  }
}

TL_INLINE int64_t panel_bytes(int32_t format, int64_t columns) {
  return num_groups(columns) * group_layout(format).bytes();
}

// Row `row` of the matrix, dequantised, float32 [columns].
void unpack_row(const TlMatrix& matrix, int64_t row, float* out);

}  // namespace tokenline
