// What an attention op's kernels work on: a tile's queries, packed, and the columns of its keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_kernels.h"

namespace tokenline {

constexpr float kLog2E = 1.44269504f;

struct AttentionOp {
  TlAttentionPlan* plan;
  const float* query;
  int64_t stride;
  int64_t num_heads;
  TlKvLayer kv;
  KvLayout layout;
  float scale;
  int64_t sliding_window;
  TlRows out;
  bool quantises_rows;  // in a stage of its own

  int64_t group() const { return num_heads / kv.num_kv_heads; }

  int64_t row_floats() const { return num_heads * kv.head_dim; }
  // Where results go as floats, if they do.
  bool uses_plans_rows() const { return quantises_rows && !out.values; }
  float* values(int64_t row) const {
    if (uses_plans_rows()) return plan->rows() + row * row_floats();
    return out.values ? out.values + row * out.stride : nullptr;
  }

  int32_t oldest_position(int32_t newest) const {
    return sliding_window > 0 && newest >= sliding_window
               ? newest + 1 - static_cast<int32_t>(sliding_window)
               : 0;
  }
  // The range of segments with keys that any query of the tile sees.
  int32_t first_segment(const AttentionItem& tile) const {
    return plan->segment_of(oldest_position(tile.first_position));
  }
  int32_t end_segment(const AttentionItem& tile) const {
    return plan->segment_of(tile.last_position()) + 1;
  }
  float* partial(const AttentionItem& tile, int32_t segment, int64_t head) const {
    return plan->partials() + tile.partials +
           (segment * kv.num_kv_heads + head) *
               tile_floats(tile.num_tokens * group(), layout.width);
  }
};

// A tile's rows go through the keys in stripes.
TL_INLINE int64_t num_stripes_of(int64_t num_rows) {
  return (num_rows + kMostRows - 1) / kMostRows;
}

// Packs the query rows that begin with `first`; num_rows of the whole tile are there.
TL_INLINE void pack_queries(const AttentionOp& op, const AttentionItem& tile, int64_t head,
                            int64_t first, int64_t num_rows, float* packed, QueryRows* to) {
  const int64_t dim = op.kv.head_dim, group = op.group();
  const float scale = op.scale * kLog2E;
  to->num_rows = static_cast<int32_t>(std::min<int64_t>(kMostRows, num_rows - first));
  to->kernel_rows = kernel_rows(to->num_rows);
  to->packed = packed;
  for (int r = 0; r < to->kernel_rows; r++) {
    const int64_t row = first + std::min(r, to->num_rows - 1);
    const int32_t position = tile.first_position + static_cast<int32_t>(row / group);
    const float* query = op.query + (tile.first_row + row / group) * op.stride +
                         (head * group + row % group) * dim;
    for (int64_t i = 0; i < dim; i++) packed[i * to->kernel_rows + r] = query[i] * scale;
    to->oldest[r] = static_cast<float>(op.oldest_position(position));
    to->newest[r] = static_cast<float>(position);
  }
  const int last = to->num_rows - 1;
  to->lowest = static_cast<int32_t>(to->oldest[0]);
  to->highest = static_cast<int32_t>(to->newest[last]);
  to->common_lowest = static_cast<int32_t>(to->oldest[last]);
  to->common_highest = static_cast<int32_t>(to->newest[0]);
}

// The columns of a segment that the tile sees any key of. What they have ahead is themselves.
template <class Element>
int find_columns(const AttentionOp& op, const AttentionItem& tile, int64_t head, int32_t segment,
                 Column<Element>* columns) {
  const int64_t per_block = op.plan->columns_per_block(), block_size = op.kv.block_size;
  const int64_t segment_column = int64_t{segment} * kSegmentColumns;
  const int64_t first =
      std::max(segment_column, op.plan->column_of(op.oldest_position(tile.first_position)));
  const int64_t end = std::min(segment_column + kSegmentColumns,
                               op.plan->column_of(tile.last_position()) + 1);
  for (int64_t i = first; i < end; i++) {
    const int64_t block = i / per_block, offset = i % per_block * kLanes;
    const KvHead<Element> from(op.kv, op.layout, tile.blocks[block], head);
    const Element* keys = from.keys + offset;
    const Element* values = from.values + offset * op.layout.width;
    columns[i - first] = {keys,
                          values,
                          from.key_scale(offset),
                          from.value_scale(offset),
                          // The column's share of what lies in sequence, whatever is in it.
                          reinterpret_cast<const char*>(from.keys + offset * op.kv.head_dim),
                          reinterpret_cast<const char*>(values),
                          static_cast<int32_t>(block * block_size + offset),
                          static_cast<int32_t>(std::min<int64_t>(kLanes, block_size - offset))};
  }
  return static_cast<int>(end - first);
}

// Whether the values of those keys are finite that some queries of the tile see and others do not.
template <class Element>
bool are_borders_finite(const AttentionOp& op, const AttentionItem& tile, int num_columns,
                        const Column<Element>* columns) {
  if (sizeof(Element) == 1 || tile.num_tokens == 1) return true;
  const int64_t width = op.layout.width;
  const int32_t newest = tile.first_position, oldest = op.oldest_position(newest);
  const int32_t last_newest = tile.last_position(), last_oldest = op.oldest_position(last_newest);
  I32x16 bits = broadcast_int(0);
  const auto check = [&](const Column<Element>& column, int32_t first, int32_t last) {
    first = std::max(0, first - column.first_position);
    last = std::min(column.num_keys - 1, last - column.first_position);
    for (int64_t i = first * width; i < (last + 1) * width; i += kLanes) {
      bits = larger(bits, as_int(magnitude(load_elements(column.values + i))));
    }
  };
  for (int c = 0; c < num_columns; c++) {
    check(columns[c], oldest, last_oldest - 1);
    check(columns[c], newest + 1, last_newest);
  }
  return largest(bits) < 0x7f800000;
}

// Fetches the keys and values of columns, all at once.
template <class Element>
void fetch_columns(const AttentionOp& op, int num_columns, const Column<Element>* columns) {
  constexpr int64_t kLine = 64;
  const int64_t element = static_cast<int64_t>(sizeof(Element)) * kLanes;
  for (int c = 0; c < num_columns; c++) {
    const char* keys = columns[c].keys_ahead;
    const char* values = columns[c].values_ahead;
    for (int64_t i = 0; i < op.kv.head_dim * element; i += kLine) fetch(keys + i);
    for (int64_t i = 0; i < op.layout.width * element; i += kLine) fetch(values + i);
  }
}

// Lets the columns of one segment fetch those of the next.
template <class Element>
void fetch_meanwhile(int num_next, const Column<Element>* next, int num_columns,
                     Column<Element>* columns) {
  for (int c = 0; c < std::min(num_columns, num_next); c++) {
    columns[c].keys_ahead = next[c].keys_ahead;
    columns[c].values_ahead = next[c].values_ahead;
    if (next[c].key_scales) {
      fetch(next[c].key_scales);
      fetch(next[c].value_scales);
    }
  }
}

}  // namespace tokenline
