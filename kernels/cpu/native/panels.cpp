// Reads packed weights back.
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

// One lane of a group of a quantised panel.
void unpack_group(int32_t format, const uint8_t* group, int64_t lane, float* out) {
  const uint8_t* quads = group + group_layout(format).scales + lane * 4;
  const auto* halves = reinterpret_cast<const uint16_t*>(group) + lane;
  const auto* wide = reinterpret_cast<const float*>(group) + lane;
  float scale, minimum = 0.0f;
  if (format == TL_Q8) {
    scale = f16_to_f32(*halves);
    read_q8(quads, out);
  } else {
    scale = format == TL_Q4 ? f16_to_f32(*halves) : *wide;
    minimum = format == TL_Q4 ? f16_to_f32(halves[kPanelRows]) : wide[kPanelRows];
    read_q4(quads, out);
  }
  for (int i = 0; i < kGroup; i++) out[i] = scale * out[i] + minimum;
}

}  // namespace

void unpack_row(const TlMatrix& matrix, int64_t row, float* out) {
  const uint8_t* panel = static_cast<const uint8_t*>(matrix.data) +
                         row / kPanelRows * panel_bytes(matrix.format, matrix.columns);
  const int64_t lane = row % kPanelRows, columns = matrix.columns;
  const auto* wide = reinterpret_cast<const float*>(panel) + lane;
  const auto* halves = reinterpret_cast<const uint16_t*>(panel) + lane;
  if (matrix.format == TL_F32) {
    for (int64_t i = 0; i < columns; i++) out[i] = wide[i * kPanelRows];
  } else if (matrix.format == TL_F16) {
    for (int64_t i = 0; i < columns; i++) out[i] = f16_to_f32(halves[i * kPanelRows]);
  } else if (matrix.format == TL_BF16) {
    for (int64_t i = 0; i < columns; i++) out[i] = bf16_to_f32(halves[i * kPanelRows]);
  } else {
    const int64_t group_bytes = group_layout(matrix.format).bytes();
    float group[kGroup];
    for (int64_t i = 0; i < columns; i += kGroup) {
      unpack_group(matrix.format, panel + i / kGroup * group_bytes, lane, group);
      const int64_t count = std::min<int64_t>(kGroup, columns - i);
      std::memcpy(out + i, group, static_cast<size_t>(count) * sizeof(float));
    }
  }
}

}  // namespace tokenline

using namespace tokenline;

int64_t tl_packed_bytes(int32_t format, int64_t rows, int64_t columns) {
  return num_panels(rows) * panel_bytes(format, columns);
}

void tl_unpack(const TlMatrix* matrix, int64_t first_row, int64_t num_rows, float* out) {
  for (int64_t i = 0; i < num_rows; i++) {
    unpack_row(*matrix, first_row + i, out + i * matrix->columns);
  }
}
