// What the stages of linear layers share: how a product is cut into chunks and its rows into tiles.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>

#include "linear_tiles.h"
#include "program.h"

namespace tokenline {

// Rows of a chunk: so many that reading the weights is nothing, so few that they stay in the cache.
constexpr int64_t kBlockRows = 64;
// Products in a chunk: at least about 1 µs, so that claiming it (0.1 µs) is little, and at most about
// 30 µs, since the last one to finish makes the other threads wait. Few rows take as long as eight:
// they wait for memory.
constexpr int64_t kLeastChunkProducts = 200'000;
constexpr int64_t kMostChunkProducts = 8'000'000;
constexpr int64_t kRowsWorthTheMemory = 8;
// Between the two, a matrix is cut into so many chunks of weights: for up to eight threads.
constexpr int64_t kChunksOfWeights = 32;

// Calls `body` with std::integral_constant<int, rows>; 1 ≤ rows ≤ most.
template <int most, class Body>
TL_INLINE void with_rows(int64_t rows, const Body& body) {
  if constexpr (most > 1) {
    if (rows < most) return with_rows<most - 1>(rows, body);
  }
  body(std::integral_constant<int, most>{});
}

// Calls `body(row, count)` for tiles of rows [first, last), as even as can be.
template <int most, class Body>
TL_INLINE void for_each_row_tile(int64_t first, int64_t last, const Body& body) {
  while (first < last) {
    const int64_t num_tiles = (last - first + most - 1) / most;
    const int64_t rows = (last - first + num_tiles - 1) / num_tiles;
    with_rows<most>(rows, [&](auto count) { body(first, count); });
    first += rows;
  }
}

// Rows of one chunk, and the units of weights that it multiplies them by.
struct Block {
  int64_t first_row, last_row;
  int64_t first_unit, last_unit;
};

// The product of a count of rows with a matrix, cut into blocks. What a unit of weights is, and
// what becomes of the products, is up to those that derive from it.
template <class Format>
class LinearStage : public Stage {
 public:
  using Rows = typename Format::Rows;

  // The weights are num_units · panels_per_unit panels.
  LinearStage(int32_t count, const TlRows& in, const TlMatrix& weight, int64_t num_units,
              int64_t panels_per_unit)
      : count_(count),
        in_(in),
        weight_(weight),
        panel_bytes_(panel_bytes(weight.format, weight.columns)),
        num_units_(num_units),
        unit_products_(panels_per_unit * kPanelRows * weight.columns) {}

  int64_t num_chunks(const int64_t* counts) const override {
    const int64_t rows = counts[count_];
    const int64_t units = units_per_chunk(rows);
    return num_blocks(rows) * ((num_units_ + units - 1) / units);
  }

  // Blocks of the same weights come one after the other.
  void run(int64_t chunk, const int64_t* counts, Scratch& scratch) const override {
    const int64_t rows = counts[count_];
    const int64_t blocks = num_blocks(rows), units = units_per_chunk(rows);
    Block block;
    block.first_row = chunk % blocks * kBlockRows;
    block.last_row = std::min(block.first_row + kBlockRows, rows);
    block.first_unit = chunk / blocks * units;
    block.last_unit = std::min(block.first_unit + units, num_units_);
    const size_t offsets = Format::kOffsets ? offsets_size() : 0;
    auto* memory = scratch.get<float>(offsets + buffer_size());
    work(block, make_rows(block, memory), memory + offsets);
  }

 protected:
  // `x` begins with the block's first row; `buffer` is memory for the block's time.
  virtual void work(const Block& block, const Rows& x, float* buffer) const = 0;
  virtual size_t buffer_size() const { return 0; }

  const uint8_t* panel(int64_t index) const {
    return static_cast<const uint8_t*>(weight_.data) + index * panel_bytes_;
  }
  const TlMatrix& weight() const { return weight_; }

 private:
  static int64_t num_blocks(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

  int64_t units_per_chunk(int64_t rows) const {
    const int64_t block_rows = std::clamp(rows, kRowsWorthTheMemory, kBlockRows);
    const int64_t unit_products = block_rows * unit_products_;
    const int64_t chunks = std::clamp<int64_t>(num_units_ * unit_products / kLeastChunkProducts, 1,
                                               kChunksOfWeights);
    const int64_t most = std::max<int64_t>(1, kMostChunkProducts / unit_products);
    return std::clamp<int64_t>((num_units_ + chunks - 1) / chunks, 1, most);
  }

  size_t offsets_size() const {
    return static_cast<size_t>(kBlockRows * num_groups(weight_.columns) + kLanes);
  }

  Rows make_rows(const Block& block, float* memory) const {
    if constexpr (std::is_same_v<Rows, FloatRows>) {
      return FloatRows{in_.values, in_.stride, weight_.columns}.from(block.first_row);
    } else {
      Rows x{in_.quantised, in_.scales, in_.sums, nullptr, num_groups(weight_.columns)};
      x = x.from(block.first_row);
      if (Format::kOffsets) {
        auto* offsets = reinterpret_cast<int32_t*>(memory);
        find_offsets(x, (block.last_row - block.first_row) * x.groups, offsets);
        x.offsets = offsets;
      }
      return x;
    }
  }

  // -128 · Σq, where `sums` are scale · Σq: the quotient is a rounding away from an integer of at
  // most 21 bits. A scale of zero or NaN gives zero, whose product with that scale is right.
  static void find_offsets(const Rows& x, int64_t size, int32_t* offsets) {
    I32x16 most = broadcast_int(0);
    for (int64_t i = 0; i < size; i += kLanes) {
      const F32x16 sums = load_some(x.sums + i, size - i);
      const F32x16 scales = load_some(x.scales + i, size - i);
      store_int(offsets + i, shift_left<7>(round_to_int((zero() - sums) / scales)));
      most = larger(most, as_int(magnitude(sums)));
    }
    constexpr int32_t kInfinity = 0x7f800000;
    if (largest(most) >= kInfinity) count_offsets(x, size, offsets);
  }

  // The same where a group's sum is too large for a float, though its values are not.
  static void count_offsets(const Rows& x, int64_t size, int32_t* offsets) {
    constexpr int kHalves = Format::kHalves;
    for (int64_t i = 0; i < size; i++) {
      offsets[i] = 0;
      const int64_t group = i / x.groups * kHalves * x.groups + i % x.groups;
      const int8_t* first = x.quantised + group * kGroup;
      const int8_t* low = first + x.groups * kGroup;
      for (int64_t k = 0; k < kGroup; k++) {
        offsets[i] -= 128 * (kHalves == 1 ? first[k] : kHalfBase * first[k] + low[k]);
      }
    }
  }

  int32_t count_;
  TlRows in_;
  TlMatrix weight_;
  int64_t panel_bytes_;
  int64_t num_units_;
  int64_t unit_products_;
};

// A type as a value.
template <class T>
struct Tag {
  using Type = T;
};

// Adds Kind<the panels of `weight`'s format>, made of the count, `in` and what follows.
template <template <class> class Kind, class... Arguments>
void add_linear_stage(TlProgram* program, int32_t count, const TlRows& in, const TlMatrix& weight,
                      const Arguments&... arguments) {
  const auto add = [&](auto panels) {
    using Panels = typename decltype(panels)::Type;
    program->add(std::make_unique<Kind<Panels>>(count, in, weight, arguments...));
  };
  const auto add_quantised = [&](auto int8, auto int16) {
    in.halves == 1 ? add(int8) : add(int16);
  };
  switch (weight.format) {
    case TL_Q4:
      return add_quantised(Tag<Q4Panels<1>>{}, Tag<Q4Panels<2>>{});
    case TL_Q4_WIDE:
      return add_quantised(Tag<Q4WidePanels<1>>{}, Tag<Q4WidePanels<2>>{});
    case TL_Q8:
      return add_quantised(Tag<Q8Panels<1>>{}, Tag<Q8Panels<2>>{});
    case TL_F16:
      return add(Tag<F16Panels>{});
    case TL_BF16:
      return add(Tag<Bf16Panels>{});
    default:
      return add(Tag<F32Panels>{});
  }
}

}  // namespace tokenline
