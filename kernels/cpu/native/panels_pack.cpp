// Packs rows of weights into panels, a row into each lane.
#include "panels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "program.h"
#include "simd.h"

namespace tokenline {
namespace {

constexpr uint32_t kLowHalves = 0x0f0f0f0f;
constexpr uint16_t kNanF16 = 0x7e00;
constexpr float kLargestF16 = 65504.0f;

template <class T>
TL_INLINE T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
TL_INLINE void write(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

// One row of a panel, and where its part of each group lies.
struct Lane {
  uint8_t* panel;
  GroupLayout layout;
  int64_t lane;

  // Number `index` of those that each lane of a group has in front of its values.
  template <class T>
  void put_scale(int64_t g, int64_t index, T value) const {
    const int64_t place = (index * kPanelRows + lane) * static_cast<int64_t>(sizeof(T));
    write(panel + g * layout.bytes() + place, value);
  }
  uint8_t* quads(int64_t g) const {
    return panel + g * layout.bytes() + layout.scales + lane * 4;
  }
};

// ------------------------------------------------------------------------------------ GGUF blocks
// Their layouts are those of GGML's block_q4_0 … block_q8_0, in ggml-common.h.

// Columns 0–15 are the low halves of the 16 bytes, 16–31 the high ones.
TL_INLINE void put_halves(const uint8_t* bytes, uint8_t* quads) {
  for (int j = 0; j < 2; j++) {
    const uint32_t even = read<uint32_t>(bytes + 8 * j), odd = read<uint32_t>(bytes + 8 * j + 4);
    write(quads + j * kQuadBytes, (even & kLowHalves) | (odd & kLowHalves) << 4);
    write(quads + (j + 2) * kQuadBytes, (even >> 4 & kLowHalves) | (odd & ~kLowHalves));
  }
}

// False where a minimum does not fit into float16, which no file of any use has.
bool pack_q4_0(const uint8_t* block, int64_t groups, const Lane& lane) {
  bool fits = true;
  for (int64_t g = 0; g < groups; g++, block += 18) {
    const uint16_t scale = read<uint16_t>(block);
    const float minimum = -8.0f * f16_to_f32(scale);
    fits = fits && !(std::fabs(minimum) > kLargestF16);
    lane.put_scale(g, 0, scale);
    lane.put_scale(g, 1, f32_to_f16(minimum));
    put_halves(block + 2, lane.quads(g));
  }
  return fits;
}

void pack_q4_1(const uint8_t* block, int64_t groups, const Lane& lane) {
  for (int64_t g = 0; g < groups; g++, block += 20) {
    lane.put_scale(g, 0, read<uint16_t>(block));
    lane.put_scale(g, 1, read<uint16_t>(block + 2));
    put_halves(block + 4, lane.quads(g));
  }
}

// Eight groups with 6-bit scales and minima, which their float32 products hold exactly.
void pack_q4_k(const uint8_t* block, int64_t groups, const Lane& lane) {
  for (int64_t first = 0; first < groups; first += 8, block += 144) {
    const float scale = f16_to_f32(read<uint16_t>(block));
    const float minimum = f16_to_f32(read<uint16_t>(block + 2));
    const uint8_t* six = block + 4;
    for (int j = 0; j < 8; j++) {
      const int scale_bits = j < 4 ? six[j] & 63 : (six[j + 4] & 15) | (six[j - 4] >> 6 << 4);
      const int minimum_bits = j < 4 ? six[j + 4] & 63 : (six[j + 4] >> 4) | (six[j] >> 6 << 4);
      lane.put_scale(first + j, 0, scale * static_cast<float>(scale_bits));
      lane.put_scale(first + j, 1, -(minimum * static_cast<float>(minimum_bits)));
    }
    // 32 bytes hold two groups, the low halves the first of them.
    const uint8_t* bytes = block + 16;
    for (int64_t g = first; g < first + 8; g += 2, bytes += 32) {
      for (int j = 0; j < 4; j++) {
        const uint32_t even = read<uint32_t>(bytes + 8 * j);
        const uint32_t odd = read<uint32_t>(bytes + 8 * j + 4);
        write(lane.quads(g) + j * kQuadBytes,
              (even & kLowHalves) | (odd & kLowHalves) << 4);
        write(lane.quads(g + 1) + j * kQuadBytes,
              (even >> 4 & kLowHalves) | (odd & ~kLowHalves));
      }
    }
  }
}

TL_INLINE void put_bytes(const void* bytes, uint8_t* quads) {
  for (int j = 0; j < kGroup / 4; j++) {
    std::memcpy(quads + j * kQuadBytes, static_cast<const uint8_t*>(bytes) + 4 * j, 4);
  }
}

void pack_q8_0(const uint8_t* block, int64_t groups, const Lane& lane) {
  for (int64_t g = 0; g < groups; g++, block += 34) {
    lane.put_scale(g, 0, read<uint16_t>(block));
    put_bytes(block + 2, lane.quads(g));
  }
}

// ----------------------------------------------------------------------------------------- floats

void read_floats(int32_t source_kind, const uint8_t* row, int64_t columns, float* out) {
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  if (source_kind == TL_SOURCE_F32) {
    std::memcpy(out, row, static_cast<size_t>(columns) * sizeof(float));
  } else if (source_kind == TL_SOURCE_F16) {
    for (int64_t i = 0; i < columns; i++) out[i] = f16_to_f32(halves[i]);
  } else {
    for (int64_t i = 0; i < columns; i++) out[i] = bf16_to_f32(halves[i]);
  }
}

// The scale is rounded first, so that values are the nearest to what they stand for. A group with a
// value that is not finite has scale NaN.
void pack_int8(const float* x, int64_t groups, const Lane& lane) {
  const F32x16 most_int8 = broadcast(127.0f), least_int8 = broadcast(-127.0f);
  for (int64_t g = 0; g < groups; g++, x += kGroup) {
    const F32x16 first = load(x), second = load(x + kLanes);
    const int32_t bits = largest(larger(as_int(magnitude(first)), as_int(magnitude(second))));
    float most;
    std::memcpy(&most, &bits, 4);
    const bool is_finite = bits < 0x7f800000;
    const uint16_t half = is_finite ? f32_to_f16(std::min(most / 127.0f, kLargestF16)) : kNanF16;
    lane.put_scale(g, 0, half);
    const float scale = f16_to_f32(half);
    int8_t quantised[kGroup] = {};
    if (scale > 0.0f) {
      const F32x16 inverse = broadcast(1.0f / scale);
      const F32x16 low = smaller(larger(first * inverse, least_int8), most_int8);
      const F32x16 high = smaller(larger(second * inverse, least_int8), most_int8);
      store_i8(quantised, round_to_int(low));
      store_i8(quantised + kLanes, round_to_int(high));
    }
    put_bytes(quantised, lane.quads(g));
  }
}

void pack_floats(int32_t format, const float* x, int64_t columns, const Lane& lane) {
  auto* wide = reinterpret_cast<float*>(lane.panel) + lane.lane;
  auto* halves = reinterpret_cast<uint16_t*>(lane.panel) + lane.lane;
  for (int64_t i = 0; i < columns; i++) {
    if (format == TL_F32) {
      wide[i * kPanelRows] = x[i];
    } else if (format == TL_F16) {
      halves[i * kPanelRows] = f32_to_f16(x[i]);
    } else {
      halves[i * kPanelRows] = f32_to_bf16(x[i]);
    }
  }
}

// --------------------------------------------------------------------------------------- packing

bool goes_into(int32_t source_kind, int32_t format, int64_t columns) {
  switch (source_kind) {
    case TL_SOURCE_F32:
    case TL_SOURCE_F16:
    case TL_SOURCE_BF16:
      return format >= TL_Q8 && format <= TL_F32;
    case TL_SOURCE_Q4_0:
    case TL_SOURCE_Q4_1:
      return format == TL_Q4 && columns % kGroup == 0;
    case TL_SOURCE_Q4_K:
      return format == TL_Q4_WIDE && columns % (8 * kGroup) == 0;
    case TL_SOURCE_Q8_0:
      return format == TL_Q8 && columns % kGroup == 0;
    default:
      return false;
  }
}

// One row into its lane. `buffer` holds the groups' columns, those beyond `columns` zero.
bool pack_row(int32_t format, int32_t source_kind, const uint8_t* row, int64_t columns,
              std::vector<float>& buffer, const Lane& lane) {
  const int64_t groups = num_groups(columns);
  switch (source_kind) {
    case TL_SOURCE_Q4_0:
      return pack_q4_0(row, groups, lane);
    case TL_SOURCE_Q4_1:
      pack_q4_1(row, groups, lane);
      return true;
    case TL_SOURCE_Q4_K:
      pack_q4_k(row, groups, lane);
      return true;
    case TL_SOURCE_Q8_0:
      pack_q8_0(row, groups, lane);
      return true;
    default:
      read_floats(source_kind, row, columns, buffer.data());
      if (format == TL_Q8) {
        pack_int8(buffer.data(), groups, lane);
      } else {
        pack_floats(format, buffer.data(), columns, lane);
      }
      return true;
  }
}

}  // namespace
}  // namespace tokenline

using namespace tokenline;

int32_t tl_pack(int32_t format, int32_t source_kind, const void* source, int64_t source_stride,
                const int64_t* order, int64_t first_row, int64_t num_rows, int64_t rows,
                int64_t columns, void* data) {
  if (!goes_into(source_kind, format, columns)) return TL_DOES_NOT_FIT;
  if (first_row % kPanelRows != 0 || first_row + num_rows > rows) return TL_DOES_NOT_FIT;
  bool fits = true;
  const int32_t status = guarded([&] {
    const int64_t bytes = panel_bytes(format, columns);
    std::vector<float> buffer(static_cast<size_t>(num_groups(columns) * kGroup));
    for (int64_t i = 0; i < num_rows && fits; i++) {
      const int64_t lane = i % kPanelRows;
      uint8_t* panel = static_cast<uint8_t*>(data) + (first_row + i) / kPanelRows * bytes;
      if (lane == 0) std::memset(panel, 0, static_cast<size_t>(bytes));
      const uint8_t* row =
          static_cast<const uint8_t*>(source) + (order ? order[i] : i) * source_stride;
      fits = pack_row(format, source_kind, row, columns, buffer,
                      {panel, group_layout(format), lane});
    }
  });
  return fits ? status : TL_DOES_NOT_FIT;
}
