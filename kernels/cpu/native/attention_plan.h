// Who attends to what: a batch's attention as a list of items of about equal cost.
//
// A sequence's keys come in segments of 8 columns of 16 lanes, counted from its first token.
// Scores, maximum and sums are taken per segment, and segments are folded in order: so a query's
// result depends on its position and its keys, never on which item it came in.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "api.h"
#include "pool.h"
#include "simd.h"

namespace tokenline {

constexpr int kSegmentColumns = 8;
constexpr int kSegmentLanes = kSegmentColumns * kLanes;

// Consecutive queries of one sequence.
struct AttentionItem {
  const int32_t* blocks;   // the sequence's block table
  int64_t first_row;       // of the batch's queries
  int32_t num_tokens;
  int32_t first_position;
  // With a range of segments, it is one part of several, which are folded afterwards.
  int32_t first_segment;
  int32_t end_segment;
  bool is_part;
  int64_t partials;  // floats before the results of this item's segment 0; parts only

  int32_t last_position() const { return first_position + num_tokens - 1; }
};

// What an attention op is like, as far as the plan needs it.
struct AttentionShape {
  int64_t num_kv_heads;
  int64_t group;  // query heads of each KV head
  int64_t width;
  int64_t row_floats;  // of all heads, where results need memory before they are quantised; or 0
};

}  // namespace tokenline

// Named in the C interface, so outside the namespace.
struct TlAttentionPlan {
  TlAttentionPlan(int32_t count, const int32_t* cu_seqlens, const int32_t* seq_lens,
                  const int32_t* block_table, int64_t max_blocks, const int32_t* sequences,
                  int64_t block_size);

  // Before the program runs, for each op that has this plan.
  void add_shape(const tokenline::AttentionShape& shape);

  // Once per run, before these ops. On one thread.
  void build(const int64_t* counts);

  // The segment that a position's key lies in, and the first position of a column's.
  int32_t segment_of(int32_t position) const {
    return static_cast<int32_t>(column_of(position) / tokenline::kSegmentColumns);
  }
  int64_t column_of(int32_t position) const {
    return position / block_size_ * columns_per_block_ +
           position % block_size_ / tokenline::kLanes;
  }
  int64_t block_size() const { return block_size_; }
  int64_t columns_per_block() const { return columns_per_block_; }

  // What the numbers of chunks are made of.
  int64_t num_items() const { return num_items_.load(std::memory_order_relaxed); }
  // Whether an item is a chunk for each KV head, or one for all of them.
  bool splits_heads() const { return splits_heads_.load(std::memory_order_relaxed); }
  int64_t num_split() const { return num_split_.load(std::memory_order_relaxed); }
  const tokenline::AttentionItem& item(int64_t i) const { return items_[i]; }
  // Tiles that were split into parts.
  const tokenline::AttentionItem& split(int64_t i) const { return split_[i]; }

  // Memory that ops use one after the other: of parts, and of rows before they are quantised.
  float* partials() const { return partials_.data; }
  float* rows() const { return rows_.data; }

 private:
  struct Memory {
    ~Memory();
    void grow(int64_t floats);
    float* data = nullptr;
    int64_t size = 0;
  };

  int64_t tokens_per_tile(int64_t num_sequences) const;
  void add_tiles(int64_t num_sequences, int64_t tile_tokens);
  void split_large_tiles();
  int64_t cost(const tokenline::AttentionItem& item) const;

  const int32_t count_;
  const int32_t* const cu_seqlens_;
  const int32_t* const seq_lens_;
  const int32_t* const block_table_;
  const int64_t max_blocks_;
  const int32_t* const sequences_;
  const int64_t block_size_;
  const int64_t columns_per_block_;
  std::vector<tokenline::AttentionShape> shapes_;
  std::vector<tokenline::AttentionItem> tiles_;
  std::vector<tokenline::AttentionItem> items_;
  std::vector<tokenline::AttentionItem> split_;
  std::atomic<int64_t> num_items_{0};
  std::atomic<int64_t> num_split_{0};
  std::atomic<bool> splits_heads_{true};
  Memory partials_;
  Memory rows_;
};
