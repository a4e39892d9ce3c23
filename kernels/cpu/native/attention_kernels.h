// Attention of a few rows of queries to one segment of keys.
//
// A row is a token and one of the heads that share a KV head. Few rows go through the keys
// together, each with its own accumulators: what becomes of a row depends on no other.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "attention_plan.h"
#include "attention_state.h"
#include "simd.h"

namespace tokenline {

// How many accumulators of 16 floats fit into registers beside what they are made of.
#if defined(TL_AVX512)
constexpr int kAccumulators = 24;
#else
constexpr int kAccumulators = 6;
#endif

constexpr int columns_at_once(int rows) {
  return rows * 4 <= kAccumulators ? 4 : rows * 2 < kAccumulators ? 2 : 1;
}

// Up to sixteen tokens of one KV head, in consecutive positions.
template <class Element>
struct Column {
  const Element* keys;
  const Element* values;
  const float* key_scales;  // NULL where the type has none, as those of values
  const float* value_scales;
  // What lies there is fetched meanwhile, as many bytes as these keys and values: the next segment.
  const char* keys_ahead;
  const char* values_ahead;
  int32_t first_position;
  int32_t num_keys;
};

struct ColumnShape {
  int64_t head_dim;
  int64_t width;       // elements from one value to the next
  int64_t key_stride;  // elements from one dimension of the keys to the next
};

// Rows that go together.
struct QueryRows {
  alignas(64) float oldest[kLanes];  // the positions that each row sees, both included
  alignas(64) float newest[kLanes];
  float* packed;  // [head_dim][kernel_rows], times scale / ln 2
  int32_t lowest, highest;               // what any of them sees
  int32_t common_lowest, common_highest;  // what all of them see
  int32_t num_rows;
  int32_t kernel_rows;
};

// Into the second-level cache: the first has not as many requests to memory under way.
TL_INLINE void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// The scores of R rows with C columns of keys; scores [R][kSegmentLanes].
template <class Element, int R, int C>
TL_INLINE void score(const float* packed, const Column<Element>* columns, const ColumnShape& shape,
                     float* scores) {
  F32x16 sums[R][C];
  const Element* keys[C];
  const char* ahead[C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[r][c] = zero();
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) {
    keys[c] = columns[c].keys;
    ahead[c] = columns[c].keys_ahead;
  }
  for (int64_t i = 0; i < shape.head_dim; i++, packed += R) {
    F32x16 key[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      key[c] = load_elements(keys[c]);
      keys[c] += shape.key_stride;
      fetch(ahead[c] + i * kLanes * static_cast<int64_t>(sizeof(Element)));
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const F32x16 query = broadcast(packed[r]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sums[r][c] = fma(query, key[c], sums[r][c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(scores + r * kSegmentLanes + c * kLanes, sums[r][c]);
  }
}

template <class Element, int R, int C>
TL_INLINE void score_all(const float* packed, const Column<Element>* columns, int first, int end,
                         const ColumnShape& shape, float* scores) {
  for (; first + C <= end; first += C) {
    score<Element, R, C>(packed, columns + first, shape, scores + first * kLanes);
  }
  if constexpr (C > 1) {
    score_all<Element, R, C / 2>(packed, columns, first, end, shape, scores);
  }
}

// C times 16 dimensions of the values' sums, weighted by R rows of `weights`, into out [R][width].
template <class Element, int R, int C>
TL_INLINE void add_values(const float* weights, const Column<Element>* columns, int num_columns,
                          const QueryRows& queries, int64_t dimension, int64_t width, float* out) {
  F32x16 sums[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[r][c] = zero();
  }
  for (int column = 0; column < num_columns; column++) {
    const Column<Element>& from = columns[column];
    // Not beyond: what nobody sees may be NaN, and NaN times 0 is NaN.
    const int32_t first = std::max(0, queries.lowest - from.first_position);
    const int32_t end = std::min(from.num_keys, queries.highest + 1 - from.first_position);
    const Element* values = from.values + first * width + dimension;
    const Element* ahead = reinterpret_cast<const Element*>(from.values_ahead) + dimension;
    const float* weight = weights + column * kLanes + first;
    for (int32_t key = first; key < end; key++) {
      F32x16 value[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        value[c] = load_elements(values + c * kLanes);
        fetch(ahead + c * kLanes);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const F32x16 factor = broadcast(weight[r * kSegmentLanes]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = fma(factor, value[c], sums[r][c]);
      }
      values += width;
      ahead += width;
      weight++;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * width + dimension + c * kLanes, sums[r][c]);
  }
}

template <class Element, int R, int C>
TL_INLINE void add_all_values(const float* weights, const Column<Element>* columns,
                              int num_columns, const QueryRows& queries, int64_t dimension,
                              int64_t width, float* out) {
  for (; dimension + C * kLanes <= width; dimension += C * kLanes) {
    add_values<Element, R, C>(weights, columns, num_columns, queries, dimension, width, out);
  }
  if constexpr (C > 1) {
    add_all_values<Element, R, C / 2>(weights, columns, num_columns, queries, dimension, width,
                                      out);
  }
}

// `x` where its key is one that the row sees, else `otherwise`.
struct Visible {
  F32x16 positions, oldest, newest;

  TL_INLINE F32x16 of(F32x16 x, F32x16 otherwise) const {
    return select_less(positions, oldest, otherwise, select_less(newest, positions, otherwise, x));
  }
};

template <class Element>
TL_INLINE F32x16 positions_of(const Column<Element>& column) {
  static constexpr float kCount[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                           8, 9, 10, 11, 12, 13, 14, 15};
  const F32x16 count = load(kCount);
  const F32x16 positions = count + broadcast(static_cast<float>(column.first_position));
  const F32x16 num_keys = broadcast(static_cast<float>(column.num_keys));
  return select_less(count, num_keys, positions, broadcast(INFINITY));
}

// Scores [R][kSegmentLanes] become weights 2^(score - largest), 0 where a row does not see the key;
// the largest scores and the sums of weights go into the head of `state`.
template <class Element>
__attribute__((noinline)) void weigh(const QueryRows& queries, const Column<Element>* columns,
                                     int num_columns, float* scores, float* state) {
  bool sees_all[kSegmentColumns];
  for (int c = 0; c < num_columns; c++) {
    const int32_t first = columns[c].first_position;
    sees_all[c] = columns[c].num_keys == kLanes && first >= queries.common_lowest &&
                  first + kLanes - 1 <= queries.common_highest;
  }
  store(state, broadcast(-FLT_MAX));
  store(state + kLanes, zero());
  for (int r = 0; r < queries.kernel_rows; r++, scores += kSegmentLanes) {
    const F32x16 oldest = broadcast(queries.oldest[r]), newest = broadcast(queries.newest[r]);
    F32x16 most = broadcast(-INFINITY);
    for (int c = 0; c < num_columns; c++) {
      F32x16 x = load(scores + c * kLanes);
      if (columns[c].key_scales) x = x * load(columns[c].key_scales);
      if (!sees_all[c]) {
        x = Visible{positions_of(columns[c]), oldest, newest}.of(x, broadcast(-INFINITY));
      }
      if (columns[c].key_scales || !sees_all[c]) store(scores + c * kLanes, x);
      most = larger(most, x);
    }
    const float most_of_row = largest(most);
    most = broadcast(most_of_row);
    F32x16 total = zero();
    for (int c = 0; c < num_columns; c++) {
      F32x16 weight = power_of_two(load(scores + c * kLanes) - most);
      if (sees_all[c]) {
        total = total + weight;
        if (columns[c].value_scales) weight = weight * load(columns[c].value_scales);
      } else {
        const Visible visible{positions_of(columns[c]), oldest, newest};
        weight = visible.of(weight, zero());
        total = total + weight;
        if (columns[c].value_scales) {
          weight = weight * visible.of(load(columns[c].value_scales), zero());
        }
      }
      store(scores + c * kLanes, weight);
    }
    state[r] = most_of_row;
    state[kLanes + r] = sum(total);
  }
}

// The state of these rows after one segment alone. Rows of more than one token must not differ in
// keys that they see whose values are not finite.
template <class Element, int R>
__attribute__((noinline)) void attend_rows(const QueryRows& queries,
                                           const Column<Element>* columns, int num_columns,
                                           const ColumnShape& shape, float* state) {
  alignas(64) float scores[R * kSegmentLanes];
  for (; num_columns && columns->first_position + columns->num_keys <= queries.lowest; columns++) {
    num_columns--;
  }
  while (num_columns && columns[num_columns - 1].first_position > queries.highest) num_columns--;
  constexpr int C = columns_at_once(R);
  score_all<Element, R, C>(queries.packed, columns, 0, num_columns, shape, scores);
  weigh(queries, columns, num_columns, scores, state);
  add_all_values<Element, R, C>(scores, columns, num_columns, queries, 0, shape.width,
                                state + kStateHeader);
}

template <class Element>
TL_INLINE void attend(const QueryRows& queries, const Column<Element>* columns, int num_columns,
                      const ColumnShape& shape, float* state) {
  const auto call = [&](auto kernel) { kernel(queries, columns, num_columns, shape, state); };
  switch (queries.kernel_rows) {
    case 1: return call(attend_rows<Element, 1>);
    case 2: return call(attend_rows<Element, 2>);
    case 3: return call(attend_rows<Element, 3>);
    case 4: return call(attend_rows<Element, 4>);
    default: return call(attend_rows<Element, 6>);
  }
}

}  // namespace tokenline
