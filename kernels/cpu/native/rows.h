// What ops that take each row by itself share: their stage, the norm, and how results are written.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "api.h"
#include "program.h"
#include "quantise.h"
#include "simd.h"

namespace tokenline {

// A stage that calls `row(index, buffer)` for each row of a count; the buffer has `buffer_size`
// floats. `work` is about how many floats a row reads.
template <class Row>
class RowStage : public Stage {
 public:
  RowStage(int32_t count, int64_t work, int64_t buffer_size, Row row)
      : count_(count),
        fewest_rows_((kWorkPerChunk + work - 1) / std::max<int64_t>(work, 1)),
        buffer_size_(buffer_size),
        row_(std::move(row)) {}

  int64_t num_chunks(const int64_t* counts) const override {
    const int64_t rows = rows_per_chunk(counts);
    return (counts[count_] + rows - 1) / rows;
  }

  void run(int64_t chunk, const int64_t* counts, Scratch& scratch) const override {
    float* buffer = scratch.get<float>(static_cast<size_t>(buffer_size_));
    const int64_t first = chunk * rows_per_chunk(counts);
    const int64_t end = std::min(first + rows_per_chunk(counts), counts[count_]);
    for (int64_t row = first; row < end; row++) row_(row, buffer);
  }

 private:
  // About half a microsecond, beside which the claiming of a chunk is little.
  static constexpr int64_t kWorkPerChunk = 2048;
  static constexpr int64_t kMostChunks = 64;

  int64_t rows_per_chunk(const int64_t* counts) const {
    return std::max({int64_t{1}, fewest_rows_, counts[count_] / kMostChunks});
  }

  int32_t count_;
  int64_t fewest_rows_;
  int64_t buffer_size_;
  Row row_;
};

// Adds such a stage to the op that was begun last.
template <class Row>
void add_row_stage(TlProgram* program, int32_t count, int64_t work, int64_t buffer_size, Row row) {
  program->add(std::make_unique<RowStage<Row>>(count, work, buffer_size, std::move(row)));
}

// Calls `part(column, left)` for every 16 columns of `width`; `left` is kLanes but for the last,
// where it may be less: as constants, so that partial loads and stores are paid for only there.
template <class Part>
TL_INLINE void for_each_part(int64_t width, Part part) {
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes) part(column, int64_t{kLanes});
  if (column < width) part(column, width - column);
}

// Writes row `row` of `out`, in the forms that it has: `part(column, left)` gives 16 columns, of
// which those beyond `left` are zero.
template <class Part>
TL_INLINE void write_parts(const TlRows& out, int64_t row, int64_t width, Part part) {
  float* values = out.values ? out.values + row * out.stride : nullptr;
  if (!out.quantised) {
    for_each_part(width, [&](int64_t column, int64_t left) TL_INLINE_LAMBDA {
      store_some(values + column, part(column, left), left);
    });
    return;
  }
  const int64_t groups = num_groups(width);
  const int64_t whole = width / kGroup;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t column = g * kGroup;
    F32x16 first, second;
    if (g < whole) {
      first = part(column, int64_t{kLanes});
      second = part(column + kLanes, int64_t{kLanes});
      if (values) {
        store(values + column, first);
        store(values + column + kLanes, second);
      }
    } else {
      const int64_t left = width - column;
      first = part(column, left);
      second = left > kLanes ? part(column + kLanes, left - kLanes) : zero();
      if (values) {
        store_some(values + column, first, left);
        if (left > kLanes) store_some(values + column + kLanes, second, left - kLanes);
      }
    }
    quantise_group(out, row, g, groups, first, second);
  }
}

// 1 / sqrt(mean(x²) + eps), where `part(column, left)` gives x. The squares are summed in 64 lanes.
template <class Part>
TL_INLINE float inverse_rms(int64_t width, float eps, Part part) {
  F32x16 s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  const auto add = [&](F32x16& squares, int64_t column, int64_t left) TL_INLINE_LAMBDA {
    const F32x16 x = part(column, left);
    squares = fma(x, x, squares);
  };
  int64_t column = 0;
  for (; column + 4 * kLanes <= width; column += 4 * kLanes) {
    add(s0, column, kLanes);
    add(s1, column + kLanes, kLanes);
    add(s2, column + 2 * kLanes, kLanes);
    add(s3, column + 3 * kLanes, kLanes);
  }
  const int64_t left = width - column;
  if (left > 0) add(s0, column, left);
  if (left > kLanes) add(s1, column + kLanes, left - kLanes);
  if (left > 2 * kLanes) add(s2, column + 2 * kLanes, left - 2 * kLanes);
  if (left > 3 * kLanes) add(s3, column + 3 * kLanes, left - 3 * kLanes);
  const float total = sum((s0 + s1) + (s2 + s3));
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

}  // namespace tokenline
