// The layout of panels, and how to read them back.
#include "panels.h"

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace tokenline {
namespace {

// The values of a lane's group, as they are stored.
TL_INLINE void read_q4(const uint8_t* quads, float* out) {
  for (int i = 0; i < kGroup; i++) {
    const uint8_t both = quads[i / 8 * kQuadBytes + i % 4];
    out[i] = static_cast<float>(i / 4 % 2 ? both >> 4 : both & 15);
  }
}

TL_INLINE void read_q8(const uint8_t* quads, float* out) {
  for (int i = 0; i < kGroup; i++) {
    out[i] = static_cast<float>(static_cast<int8_t>(quads[i / 4 * kQuadBytes + i % 4]));
  }
}

// Group `g` of a lane; `scales` and `values` are the parts of its panel.
void unpack_group(int32_t format, const uint8_t* scales, const uint8_t* values, int64_t lane,
                  int64_t g, float* out) {
  const auto* halves = reinterpret_cast<const uint16_t*>(scales) + lane;
  const auto* wide = reinterpret_cast<const float*>(scales) + lane;
  float scale, minimum = 0.0f;
  if (format == TL_Q8) {
    scale = f16_to_f32(halves[g * kPanelRows]);
    read_q8(values + g * kQ8GroupBytes + lane * 4, out);
  } else {
    const int64_t place = 2 * g * kPanelRows;
    scale = format == TL_Q4 ? f16_to_f32(halves[place]) : wide[place];
    minimum = format == TL_Q4 ? f16_to_f32(halves[place + kPanelRows]) : wide[place + kPanelRows];
    read_q4(values + g * kQ4GroupBytes + lane * 4, out);
  }
  for (int i = 0; i < kGroup; i++) out[i] = scale * out[i] + minimum;
}

}  // namespace

PanelLayout panel_layout(int32_t format, int64_t columns) {
  const int64_t groups = num_groups(columns);
  switch (format) {
    case TL_Q4:
      return {groups * kPanelRows * 4, groups * kQ4GroupBytes};
    case TL_Q4_WIDE:
      return {groups * kPanelRows * 8, groups * kQ4GroupBytes};
    case TL_Q8:
      return {(groups * kPanelRows * 2 + 63) / 64 * 64, groups * kQ8GroupBytes};
    case TL_F32:
      return {0, groups * kGroup * kPanelRows * 4};
    default:
      return {0, groups * kGroup * kPanelRows * 2};
  }
}

void unpack_row(const TlMatrix& matrix, int64_t row, float* out) {
  const PanelLayout layout = panel_layout(matrix.format, matrix.columns);
  const uint8_t* scales =
      static_cast<const uint8_t*>(matrix.data) + row / kPanelRows * layout.bytes();
  const uint8_t* values = scales + layout.scales;
  const int64_t lane = row % kPanelRows, columns = matrix.columns;
  const auto* wide = reinterpret_cast<const float*>(values) + lane;
  const auto* halves = reinterpret_cast<const uint16_t*>(values) + lane;
  if (matrix.format == TL_F32) {
    for (int64_t i = 0; i < columns; i++) out[i] = wide[i * kPanelRows];
  } else if (matrix.format == TL_F16) {
    for (int64_t i = 0; i < columns; i++) out[i] = f16_to_f32(halves[i * kPanelRows]);
  } else if (matrix.format == TL_BF16) {
    for (int64_t i = 0; i < columns; i++) out[i] = bf16_to_f32(halves[i * kPanelRows]);
  } else {
    float group[kGroup];
    for (int64_t i = 0; i < columns; i += kGroup) {
      unpack_group(matrix.format, scales, values, lane, i / kGroup, group);
      const int64_t count = std::min<int64_t>(kGroup, columns - i);
      std::memcpy(out + i, group, static_cast<size_t>(count) * sizeof(float));
    }
  }
}

}  // namespace tokenline

using namespace tokenline;

int64_t tl_packed_bytes(int32_t format, int64_t rows, int64_t columns) {
  return num_panels(rows) * panel_layout(format, columns).bytes();
}

void tl_unpack(const TlMatrix* matrix, int64_t first_row, int64_t num_rows, float* out) {
  for (int64_t i = 0; i < num_rows; i++) {
    unpack_row(*matrix, first_row + i, out + i * matrix->columns);
  }
}
