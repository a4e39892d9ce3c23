// Causal attention over the paged cache (Kwon et al., "Efficient memory management for large
// language model serving with PagedAttention", 2023): the op's stages.
#include <cstring>

#include "attention_kernels.h"
#include "rows.h"

namespace tokenline {
namespace {

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
int64_t num_stripes_of(int64_t num_rows) { return (num_rows + kMostRows - 1) / kMostRows; }

// Packs the query rows that begin with `first`; num_rows of the whole tile are there.
void pack_queries(const AttentionOp& op, const AttentionItem& tile, int64_t head, int64_t first,
                  int64_t num_rows, float* packed, QueryRows* to) {
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

// The columns of a segment that the tile sees any key of.
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
    columns[i - first] = {from.keys + offset,
                          from.values + offset * op.layout.width,
                          from.key_scale(offset),
                          from.value_scale(offset),
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

// One row at a time, each up to its own last key: where values that some rows do not see are not
// finite, a weight of 0 would not keep them out.
template <class Element>
void attend_singly(const QueryRows& queries, const Column<Element>* columns, int num_columns,
                   const ColumnShape& shape, float* memory, float* state) {
  float* row_state = memory + KvLayout::up_to(shape.head_dim, kLanes);
  clear_state(state, queries.kernel_rows, shape.width);
  for (int r = 0; r < queries.num_rows; r++) {
    QueryRows one;
    one.packed = memory;
    one.num_rows = one.kernel_rows = 1;
    one.oldest[0] = queries.oldest[r];
    one.newest[0] = queries.newest[r];
    one.lowest = one.common_lowest = static_cast<int32_t>(queries.oldest[r]);
    one.highest = one.common_highest = static_cast<int32_t>(queries.newest[r]);
    for (int64_t i = 0; i < shape.head_dim; i++) {
      memory[i] = queries.packed[i * queries.kernel_rows + r];
    }
    attend_rows<Element, 1>(one, columns, num_columns, shape, row_state);
    state[r] = row_state[0];
    state[kLanes + r] = row_state[kLanes];
    std::memcpy(state + kStateHeader + r * shape.width, row_state + kStateHeader,
                static_cast<size_t>(shape.width) * sizeof(float));
  }
}

// Writes the results of the rows from `first` on, whose keys are all in `state`.
void write_results(const AttentionOp& op, const AttentionItem& tile, int64_t head, int64_t first,
                   int64_t num_rows, const float* state) {
  const int64_t dim = op.kv.head_dim, group = op.group(), width = op.layout.width;
  const int64_t heads_groups = dim / kGroup;
  const float* sums = state + kStateHeader;
  const int64_t end = std::min(first + kMostRows, num_rows);
  for (int64_t row = first; row < end; row++, sums += width) {
    const F32x16 inverse = broadcast(1.0f / state[kLanes + row - first]);
    const int64_t token = tile.first_row + row / group, query_head = head * group + row % group;
    // The zero is for -0, which depends on how many keys that are not seen went along.
    const auto part = [&](int64_t i) TL_INLINE_LAMBDA { return load(sums + i) * inverse + zero(); };
    if (float* values = op.values(token)) {
      values += query_head * dim;
      for_each_part(dim, [&](int64_t i, int64_t left) { store_some(values + i, part(i), left); });
    }
    if (!op.out.quantised || op.quantises_rows) continue;
    for (int64_t g = 0; g < heads_groups; g++) {
      const int64_t place = (token * op.num_heads + query_head) * heads_groups + g;
      quantise_group(part(g * kGroup), part(g * kGroup + kLanes),
                     op.out.quantised + place * kGroup, op.out.scales + place,
                     op.out.sums + place);
    }
  }
}

// Where the parts of an item's memory lie, in floats.
struct ItemMemory {
  ItemMemory(const AttentionOp& op, const AttentionItem& item)
      : num_rows(item.num_tokens * op.group()), num_stripes(num_stripes_of(num_rows)) {
    const int64_t width = op.layout.width;
    const int64_t query_floats = KvLayout::up_to(kMostRows * op.kv.head_dim, kLanes);
    const int64_t descriptors = static_cast<int64_t>(sizeof(QueryRows) / sizeof(float));
    packed = num_stripes * descriptors;
    packed_stride = query_floats;
    state = packed + num_stripes * query_floats;
    segment_state = state + tile_floats(num_rows, width);
    single = segment_state + state_floats(kMostRows, width);
    size = single + width + state_floats(1, width);
  }

  int64_t num_rows, num_stripes;
  int64_t packed, packed_stride, state, segment_state, single, size;
};

template <class Element>
class AttentionStage : public Stage {
 public:
  explicit AttentionStage(const AttentionOp& op) : op_(op) {}

  int64_t num_chunks(const int64_t*) const override {
    return op_.plan->num_items() * op_.kv.num_kv_heads;
  }

  void run(int64_t chunk, const int64_t*, Scratch& scratch) const override {
    const AttentionItem& item = op_.plan->item(chunk / op_.kv.num_kv_heads);
    const int64_t head = chunk % op_.kv.num_kv_heads, width = op_.layout.width;
    const ItemMemory at(op_, item);
    float* memory = scratch.get<float>(static_cast<size_t>(at.size));
    QueryRows* queries = reinterpret_cast<QueryRows*>(memory);
    for (int64_t i = 0; i < at.num_stripes; i++) {
      pack_queries(op_, item, head, i * kMostRows, at.num_rows,
                   memory + at.packed + i * at.packed_stride, &queries[i]);
    }
    if (!item.is_part) {
      float* state = memory + at.state;
      for (int64_t i = 0; i < at.num_stripes; i++, state += state_floats(kMostRows, width)) {
        clear_state(state, queries[i].kernel_rows, width);
      }
    }
    const int32_t first = std::max(item.first_segment, op_.first_segment(item));
    const int32_t end = std::min(item.end_segment, op_.end_segment(item));
    for (int32_t segment = first; segment < end; segment++) {
      add_segment(item, head, segment, at, queries, memory);
    }
    if (item.is_part) return;
    const float* state = memory + at.state;
    for (int64_t i = 0; i < at.num_stripes; i++, state += state_floats(kMostRows, width)) {
      write_results(op_, item, head, i * kMostRows, at.num_rows, state);
    }
  }

 private:
  void add_segment(const AttentionItem& item, int64_t head, int32_t segment, const ItemMemory& at,
                   const QueryRows* queries, float* memory) const {
    Column<Element> columns[kSegmentColumns];
    const int64_t width = op_.layout.width;
    const ColumnShape shape{op_.kv.head_dim, width, op_.layout.lanes};
    const int num_columns = find_columns(op_, item, head, segment, columns);
    const bool is_finite = are_borders_finite(op_, item, num_columns, columns);
    for (int64_t i = 0; i < at.num_stripes; i++) {
      const int64_t before = i * state_floats(kMostRows, width);
      float* to = item.is_part ? op_.partial(item, segment, head) + before
                               : memory + at.segment_state;
      if (is_finite) {
        attend(queries[i], columns, num_columns, shape, to);
      } else {
        attend_singly(queries[i], columns, num_columns, shape, memory + at.single, to);
      }
      if (!item.is_part) {
        fold_state(memory + at.state + before, to, queries[i].kernel_rows, width);
      }
    }
  }

  AttentionOp op_;
};

// Puts together what the parts of split tiles have found.
class FoldStage : public Stage {
 public:
  explicit FoldStage(const AttentionOp& op) : op_(op) {}

  int64_t num_chunks(const int64_t*) const override {
    return op_.plan->num_split() * op_.kv.num_kv_heads;
  }

  void run(int64_t chunk, const int64_t*, Scratch& scratch) const override {
    const AttentionItem& tile = op_.plan->split(chunk / op_.kv.num_kv_heads);
    const int64_t head = chunk % op_.kv.num_kv_heads, width = op_.layout.width;
    const int64_t num_rows = tile.num_tokens * op_.group();
    float* state = scratch.get<float>(static_cast<size_t>(state_floats(kMostRows, width)));
    for (int64_t i = 0; i < num_stripes_of(num_rows); i++) {
      const int rows = kernel_rows(std::min<int64_t>(kMostRows, num_rows - i * kMostRows));
      clear_state(state, rows, width);
      for (int32_t segment = op_.first_segment(tile); segment < op_.end_segment(tile); segment++) {
        const float* part = op_.partial(tile, segment, head) + i * state_floats(kMostRows, width);
        fold_state(state, part, rows, width);
      }
      write_results(op_, tile, head, i * kMostRows, num_rows, state);
    }
  }

 private:
  AttentionOp op_;
};

// A head that is no multiple of 32 shares a group with the next: quantised when all are there.
void add_quantise_stage(TlProgram* program, int32_t count, const AttentionOp& op) {
  TlRows out = op.out;
  out.values = nullptr;
  add_row_stage(program, count, op.row_floats(), 0, [=](int64_t row, float*) {
    const float* values = op.values(row);
    write_parts(out, row, op.row_floats(), [=](int64_t column, int64_t left) TL_INLINE_LAMBDA {
      return load_some(values + column, left);
    });
  });
}

}  // namespace
}  // namespace tokenline

using namespace tokenline;

void tl_add_attention(TlProgram* program, int32_t count, TlAttentionPlan* plan, const float* query,
                      int64_t stride, int64_t num_heads, TlKvLayer kv, float scale,
                      int64_t sliding_window, TlRows out) {
  program->begin_op("attention");
  const KvLayout layout(kv.type, kv.block_size, kv.num_kv_heads, kv.head_dim);
  const bool quantises_rows = out.quantised && kv.head_dim % kGroup != 0;
  const AttentionOp op{plan,  query,          stride, num_heads,     kv, layout,
                       scale, sliding_window, out,    quantises_rows};
  plan->add_shape({kv.num_kv_heads, op.group(), layout.width,
                   op.uses_plans_rows() ? op.row_floats() : 0});
  if (kv.type == TL_KV_F32) {
    program->add(std::make_unique<AttentionStage<float>>(op));
  } else if (kv.type == TL_KV_F16) {
    program->add(std::make_unique<AttentionStage<uint16_t>>(op));
  } else {
    program->add(std::make_unique<AttentionStage<int8_t>>(op));
  }
  program->add(std::make_unique<FoldStage>(op));
  if (quantises_rows) add_quantise_stage(program, count, op);
}
