// What the stages of linear layers share: how a product is cut into chunks.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>

#include "linear_amx.h"
#include "linear_block.h"
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

// Rows of one chunk, and the units of weights that it multiplies them by.
struct Block {
  int64_t first_row, num_rows;
  int64_t first_unit, last_unit;
};

#if defined(TL_AMX)
template <class Format>
using ProductsOf =
    std::conditional_t<Format::kIsQuantised, TileProducts<Format>, BlockProducts<Format>>;
#else
template <class Format>
using ProductsOf = BlockProducts<Format>;
#endif

// The product of a count of rows with a matrix, cut into blocks. What a unit of weights is, and
// what becomes of the products, is up to those that derive from it.
template <class Format>
class LinearStage : public Stage {
 public:
  using Rows = typename Format::Rows;
  using Products = ProductsOf<Format>;

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
    const Block block = block_of(chunk, counts[count_]);
    const size_t products_bytes = Products::memory_bytes(kBlockRows, num_groups(weight_.columns));
    auto* memory = scratch.get<char>(products_bytes + buffer_floats() * sizeof(float));
    work(block, Products(first_rows().from(block.first_row), block.num_rows, memory),
         reinterpret_cast<float*>(memory + products_bytes));
  }

  Span weights(int64_t chunk, int piece, const int64_t* counts) const override {
    const int64_t rows = std::max<int64_t>(counts[count_], 1);
    return weights_of(block_of(chunk, rows), piece);
  }

 protected:
  // `buffer` is memory for the block's time.
  virtual void work(const Block& block, const Products& products, float* buffer) const = 0;
  virtual size_t buffer_floats() const { return 0; }
  // As Stage::weights.
  virtual Span weights_of(const Block& block, int piece) const = 0;

  const uint8_t* panel(int64_t index) const {
    return static_cast<const uint8_t*>(weight_.data) + index * panel_bytes_;
  }
  Span panels(int64_t first, int64_t count) const { return {panel(first), count * panel_bytes_}; }
  const TlMatrix& weight() const { return weight_; }

 private:
  Block block_of(int64_t chunk, int64_t rows) const {
    const int64_t blocks = num_blocks(rows), units = units_per_chunk(rows);
    Block block;
    block.first_row = chunk % blocks * kBlockRows;
    block.num_rows = std::min(kBlockRows, rows - block.first_row);
    block.first_unit = chunk / blocks * units;
    block.last_unit = std::min(block.first_unit + units, num_units_);
    return block;
  }

  static int64_t num_blocks(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

  int64_t units_per_chunk(int64_t rows) const {
    const int64_t block_rows = std::clamp(rows, kRowsWorthTheMemory, kBlockRows);
    const int64_t unit_products = block_rows * unit_products_;
    const int64_t chunks = std::clamp<int64_t>(num_units_ * unit_products / kLeastChunkProducts, 1,
                                               kChunksOfWeights);
    const int64_t most = std::max<int64_t>(1, kMostChunkProducts / unit_products);
    return std::clamp<int64_t>((num_units_ + chunks - 1) / chunks, 1, most);
  }

  Rows first_rows() const {
    if constexpr (std::is_same_v<Rows, FloatRows>) {
      return {in_.values, in_.stride, weight_.columns};
    } else {
      return {in_.quantised, in_.scales, in_.sums, nullptr, num_groups(weight_.columns)};
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
