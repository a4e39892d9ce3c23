// See attention_plan.h.
#include "attention_plan.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "attention.h"
#include "attention_state.h"
#include "program.h"

using namespace tokenline;

namespace {

// Queries and sums of a tile stay in the second-level cache beside a segment's keys and values.
constexpr int64_t kTileFloats = 12 * 1024;
// Of larger shares of all work than one in so many, threads would wait for the last.
constexpr int64_t kWantedChunks = 24;
// Tiles become no smaller for more chunks than this: each reads all keys.
constexpr int64_t kFewestTileRows = 24;
// Parts become no smaller: each costs a fold.
constexpr int64_t kFewestPartSegments = 2;
// Tiles of more tokens are enough work without being split.
constexpr int64_t kMostSplitTokens = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class PlanStage : public Stage {
 public:
  explicit PlanStage(TlAttentionPlan* plan) : plan_(plan) {}
  int64_t num_chunks(const int64_t*) const override { return 1; }
  void run(int64_t, const int64_t* counts, Scratch&) const override { plan_->build(counts); }

 private:
  TlAttentionPlan* plan_;
};

}  // namespace

TlAttentionPlan::Memory::~Memory() { std::free(data); }

void TlAttentionPlan::Memory::grow(int64_t floats) {
  if (floats <= size) return;
  std::free(data);
  size = 0;
  const int64_t enough = KvLayout::up_to(floats + floats / 2, 1024);
  data = static_cast<float*>(
      std::aligned_alloc(64, static_cast<size_t>(enough) * sizeof(float)));
  if (!data) throw std::bad_alloc();
  size = enough;
}

TlAttentionPlan::TlAttentionPlan(int32_t count, const int32_t* cu_seqlens, const int32_t* seq_lens,
                                 const int32_t* block_table, int64_t max_blocks,
                                 const int32_t* sequences, int64_t block_size)
    : count_(count),
      cu_seqlens_(cu_seqlens),
      seq_lens_(seq_lens),
      block_table_(block_table),
      max_blocks_(max_blocks),
      sequences_(sequences),
      block_size_(block_size),
      columns_per_block_(ceil_div(block_size, kLanes)) {}

void TlAttentionPlan::add_shape(const AttentionShape& shape) {
  for (AttentionShape& known : shapes_) {
    if (known.num_kv_heads == shape.num_kv_heads && known.group == shape.group &&
        known.width == shape.width) {
      known.row_floats = std::max(known.row_floats, shape.row_floats);
      return;
    }
  }
  shapes_.push_back(shape);
}

void TlAttentionPlan::build(const int64_t* counts) {
  const int64_t num_sequences = shapes_.empty() ? 0 : counts[count_];
  tiles_.clear();
  items_.clear();
  split_.clear();
  if (num_sequences > 0) {
    add_tiles(num_sequences, tokens_per_tile(num_sequences));
    split_large_tiles();
    std::stable_sort(items_.begin(), items_.end(),
                     [this](const AttentionItem& a, const AttentionItem& b) {
                       return cost(a) > cost(b);
                     });
    int64_t total = 0, row_floats = 0;
    for (const AttentionItem& item : items_) total += cost(item);
    splits_heads_.store(kWantedChunks * cost(items_.front()) > total, std::memory_order_relaxed);
    for (const AttentionShape& shape : shapes_) row_floats = std::max(row_floats, shape.row_floats);
    rows_.grow(cu_seqlens_[num_sequences] * row_floats);
  }
  num_items_.store(static_cast<int64_t>(items_.size()), std::memory_order_relaxed);
  num_split_.store(static_cast<int64_t>(split_.size()), std::memory_order_relaxed);
}

// Sized for the first op's shape; others do with it.
int64_t TlAttentionPlan::tokens_per_tile(int64_t num_sequences) const {
  const AttentionShape& shape = shapes_.front();
  int64_t total = 0, most_segments = 1;
  for (int64_t i = 0; i < num_sequences; i++) {
    const int64_t tokens = cu_seqlens_[i + 1] - cu_seqlens_[i];
    const int32_t length = seq_lens_[sequences_ ? sequences_[i] : i];
    const int64_t last = segment_of(length - 1) + 1;
    const int64_t first = segment_of(length - static_cast<int32_t>(tokens)) + 1;
    total += tokens * (first + last) / 2;
    if (tokens > 1) most_segments = std::max(most_segments, last);
  }
  int64_t tokens = std::max<int64_t>(1, kTileFloats / (shape.width * shape.group));
  while (tokens > 1 && tokens * shape.group > kFewestTileRows &&
         kWantedChunks * tokens * most_segments > total * shape.num_kv_heads) {
    tokens = ceil_div(tokens, 2);
  }
  return tokens;
}

void TlAttentionPlan::add_tiles(int64_t num_sequences, int64_t tile_tokens) {
  for (int64_t i = 0; i < num_sequences; i++) {
    const int64_t row = sequences_ ? sequences_[i] : i;
    const int64_t first = cu_seqlens_[i], end = cu_seqlens_[i + 1];
    const int64_t context = seq_lens_[row] - (end - first);
    for (int64_t token = first; token < end; token += tile_tokens) {
      AttentionItem tile{};
      tile.blocks = block_table_ + row * max_blocks_;
      tile.first_row = token;
      tile.num_tokens = static_cast<int32_t>(std::min(tile_tokens, end - token));
      tile.first_position = static_cast<int32_t>(context + token - first);
      tile.end_segment = segment_of(tile.last_position()) + 1;
      tiles_.push_back(tile);
    }
  }
}

// Few long tiles become parts, so that many threads can share them.
void TlAttentionPlan::split_large_tiles() {
  int64_t total = 0, num_floats = 0;
  for (const AttentionItem& tile : tiles_) total += cost(tile);
  total = std::max<int64_t>(1, total * shapes_.front().num_kv_heads);
  for (AttentionItem& tile : tiles_) {
    const int64_t segments = tile.end_segment;
    const int64_t parts = std::min(ceil_div(kWantedChunks * cost(tile), total),
                                   segments / kFewestPartSegments);
    if (parts < 2 || tile.num_tokens > kMostSplitTokens) {
      items_.push_back(tile);
      continue;
    }
    tile.is_part = true;
    tile.partials = num_floats;
    int64_t floats = 0;
    for (const AttentionShape& shape : shapes_) {
      floats = std::max(floats, shape.num_kv_heads *
                                    tile_floats(tile.num_tokens * shape.group, shape.width));
    }
    num_floats += floats * segments;
    split_.push_back(tile);
    for (int64_t part = 0; part < parts; part++) {
      AttentionItem item = tile;
      item.first_segment = static_cast<int32_t>(segments * part / parts);
      item.end_segment = static_cast<int32_t>(segments * (part + 1) / parts);
      items_.push_back(item);
    }
  }
  partials_.grow(num_floats);
}

int64_t TlAttentionPlan::cost(const AttentionItem& item) const {
  return int64_t{item.num_tokens} * (item.end_segment - item.first_segment);
}

TlAttentionPlan* tl_add_attention_plan(TlProgram* program, int32_t sequences_count,
                                       const int32_t* cu_seqlens, const int32_t* seq_lens,
                                       const int32_t* block_table, int64_t max_blocks,
                                       const int32_t* sequences, int64_t block_size) {
  TlAttentionPlan* plan = nullptr;
  const int32_t status = guarded([&] {
    program->begin_op("attention_plan");
    plan = program->keep(std::make_shared<TlAttentionPlan>(
        sequences_count, cu_seqlens, seq_lens, block_table, max_blocks, sequences, block_size));
    program->add(std::make_unique<PlanStage>(plan));
  });
  return status == TL_OK ? plan : nullptr;
}
