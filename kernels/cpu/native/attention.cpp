// Causal attention over the paged cache (Kwon et al., "Efficient memory management for large
// language model serving with PagedAttention", 2023): the op's stages.
#include <cstring>

#include "attention_tile.h"
#include "rows.h"

namespace tokenline {
namespace {

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
      quantise_group(op.out, token, query_head * heads_groups + g, op.num_heads * heads_groups,
                     part(g * kGroup), part(g * kGroup + kLanes));
    }
  }
}

// Where the parts of the memory for an item's head lie, in floats.
struct ItemMemory {
  ItemMemory(const AttentionOp& op, const AttentionItem& item)
      : num_rows(item.num_tokens * op.group()),
        num_stripes(num_stripes_of(num_rows)),
        width(op.layout.width) {
    packed = num_stripes * static_cast<int64_t>(sizeof(QueryRows) / sizeof(float));
    packed_stride = kMostRows * width;
    state = packed + num_stripes * packed_stride;
    segment_state = state + tile_floats(num_rows, width);
    single = segment_state + state_floats(kMostRows, width);
    size = single + width + state_floats(1, width);
  }

  QueryRows* queries(float* memory) const { return reinterpret_cast<QueryRows*>(memory); }
  // The state of a stripe's rows.
  float* stripe(float* memory, int64_t i) const {
    return memory + state + i * state_floats(kMostRows, width);
  }

  int64_t num_rows, num_stripes, width;
  int64_t packed, packed_stride, state, segment_state, single, size;
};

template <class Element>
class AttentionStage : public Stage {
 public:
  explicit AttentionStage(const AttentionOp& op) : op_(op) {}

  // Few items are shared out head by head.
  int64_t num_chunks(const int64_t*) const override {
    return op_.plan->num_items() * (op_.plan->splits_heads() ? op_.kv.num_kv_heads : 1);
  }

  void run(int64_t chunk, const int64_t*, Scratch& scratch) const override {
    const int64_t num_heads = op_.kv.num_kv_heads;
    if (op_.plan->splits_heads()) {
      const int64_t head = chunk % num_heads;
      attend_heads(op_.plan->item(chunk / num_heads), head, head + 1, scratch);
    } else {
      attend_heads(op_.plan->item(chunk), 0, num_heads, scratch);
    }
  }

 private:
  void attend_heads(const AttentionItem& item, int64_t first_head, int64_t end_head,
                    Scratch& scratch) const {
    const int32_t first = std::max(item.first_segment, op_.first_segment(item));
    const int32_t end = std::min(item.end_segment, op_.end_segment(item));
    if (first >= end) return;
    const ItemMemory at(op_, item);
    float* memory = scratch.get<float>(static_cast<size_t>(at.size));
    // Of this segment and the next, which may be the first of the next head, in turn.
    Column<Element> columns[2][kSegmentColumns];
    int num_columns[2];
    int now = 0;
    num_columns[now] = find_columns(op_, item, first_head, first, columns[now]);
    fetch_columns(op_, num_columns[now], columns[now]);
    for (int64_t head = first_head; head < end_head; head++) {
      begin_head(item, head, at, memory);
      for (int32_t segment = first; segment < end; segment++, now = 1 - now) {
        const int then = 1 - now;
        const bool is_last = segment + 1 == end;
        if (!is_last || head + 1 < end_head) {
          num_columns[then] = find_columns(op_, item, is_last ? head + 1 : head,
                                           is_last ? first : segment + 1, columns[then]);
          fetch_meanwhile(num_columns[then], columns[then], num_columns[now], columns[now]);
        }
        add_segment(item, head, segment, num_columns[now], columns[now], at, memory);
      }
      if (!item.is_part) end_head_of(item, head, at, memory);
    }
  }

  void begin_head(const AttentionItem& item, int64_t head, const ItemMemory& at,
                  float* memory) const {
    QueryRows* queries = at.queries(memory);
    for (int64_t i = 0; i < at.num_stripes; i++) {
      pack_queries(op_, item, head, i * kMostRows, at.num_rows,
                   memory + at.packed + i * at.packed_stride, &queries[i]);
      if (!item.is_part) clear_state(at.stripe(memory, i), queries[i].kernel_rows, at.width);
    }
  }

  void end_head_of(const AttentionItem& item, int64_t head, const ItemMemory& at,
                   float* memory) const {
    for (int64_t i = 0; i < at.num_stripes; i++) {
      write_results(op_, item, head, i * kMostRows, at.num_rows, at.stripe(memory, i));
    }
  }

  void add_segment(const AttentionItem& item, int64_t head, int32_t segment, int num_columns,
                   const Column<Element>* columns, const ItemMemory& at, float* memory) const {
    const ColumnShape shape{op_.kv.head_dim, at.width, op_.layout.lanes};
    const QueryRows* queries = at.queries(memory);
    const bool is_finite = are_borders_finite(op_, item, num_columns, columns);
    for (int64_t i = 0; i < at.num_stripes; i++) {
      float* to = item.is_part
                      ? op_.partial(item, segment, head) + i * state_floats(kMostRows, at.width)
                      : memory + at.segment_state;
      if (is_finite) {
        attend(queries[i], columns, num_columns, shape, to);
      } else {
        attend_singly(queries[i], columns, num_columns, shape, memory + at.single, to);
      }
      if (!item.is_part) fold_state(at.stripe(memory, i), to, queries[i].kernel_rows, at.width);
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

int32_t tl_add_attention(TlProgram* program, int32_t count, TlAttentionPlan* plan,
                         const float* query, int64_t stride, int64_t num_heads, TlKvLayer kv,
                         float scale, int64_t sliding_window, TlRows out) {
  return guarded([&] {
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
  });
}
