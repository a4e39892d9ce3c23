// The rows of a block times a panel, tile by tile.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "linear_tiles.h"

namespace tokenline {

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

TL_INLINE bool is_intel() {
#if defined(__x86_64__)
  static const bool result = __builtin_cpu_is("intel");
  return result;
#else
  return false;
#endif
}

// A tile's share of the panel after this one.
template <class Format>
TL_INLINE Ahead share_of_next(const uint8_t* panel, const typename Format::Rows& x, int64_t tile,
                              int64_t num_tiles) {
  const int64_t bytes = (Format::kStepBytes + num_tiles - 1) / num_tiles;
  return {panel + x.steps() * (Format::kStepBytes + tile * bytes), bytes};
}

// Products of a block's rows with one panel after the other; `memory` lasts as long as this.
template <class Format>
class BlockProducts {
 public:
  using Rows = typename Format::Rows;

  // `x` begins with the block's first row.
  BlockProducts(const Rows& x, int64_t num_rows, void* memory) : x_(x), num_rows_(num_rows) {
    if constexpr (Format::kOffsets) {
      auto* offsets = static_cast<int32_t*>(memory);
      find_offsets(num_rows * x.groups, offsets);
      x_.offsets = offsets;
    }
  }

  static size_t memory_bytes(int64_t most_rows, int64_t groups) {
    return Format::kOffsets ? static_cast<size_t>(most_rows * groups + kLanes) * 4 : 0;
  }

  // For each tile of R rows from `row` of the block on: `prepare(row, R)`, which may fetch what `take`
  // needs, then `take(row, products)`, which gets F32x16 [R].
  template <class Prepare, class Take>
  TL_INLINE void multiply_by(const uint8_t* panel, const Prepare& prepare, const Take& take) const {
    int64_t tile = 0;
    for_each_row_tile<Format::kTileRows>(0, num_rows_, [&](int64_t row, auto count) {
      F32x16 products[decltype(count)::value];
      prepare(row, count);
      multiply<Format>(panel, x_.from(row), ahead_of(panel, tile++), products);
      take(row, products);
    });
  }

 private:
  // What a tile of a panel fetches. How far ahead was found by trial. One row or two wait for memory
  // only: near enough for the machine's own prefetching to follow. Else, on an AMD Zen 4, 8 KiB, by
  // each tile anew; on an Intel Xeon with AMX, where lines that are asked for again take the places
  // of others, the tile's share of the next panel: with 16 to 64 rows the former was 5 to 15 % slower
  // there. On the AMD the latter was.
  TL_INLINE Ahead ahead_of(const uint8_t* panel, int64_t tile) const {
    constexpr int64_t kStep = Format::kStepBytes;
    if (num_rows_ <= 2) return {panel + 1024, kStep};
    if (!is_intel()) return {panel + 8192, kStep};
    const int64_t num_tiles = (num_rows_ + Format::kTileRows - 1) / Format::kTileRows;
    return share_of_next<Format>(panel, x_, tile, num_tiles);
  }

  // -128 · Σq, where `sums` are scale · Σq: the quotient is a rounding away from an integer of at
  // most 21 bits. A scale of zero or NaN gives zero, whose product with that scale is right.
  void find_offsets(int64_t size, int32_t* offsets) const {
    I32x16 most = broadcast_int(0);
    for (int64_t i = 0; i < size; i += kLanes) {
      const F32x16 sums = load_some(x_.sums + i, size - i);
      const F32x16 scales = load_some(x_.scales + i, size - i);
      store_int(offsets + i, shift_left<7>(round_to_int((zero() - sums) / scales)));
      most = larger(most, as_int(magnitude(sums)));
    }
    constexpr int32_t kInfinity = 0x7f800000;
    if (largest(most) >= kInfinity) count_offsets(size, offsets);
  }

  // The same where a group's sum is too large for a float, though its values are not.
  void count_offsets(int64_t size, int32_t* offsets) const {
    constexpr int kHalves = Format::kHalves;
    for (int64_t i = 0; i < size; i++) {
      offsets[i] = 0;
      const int64_t group = i / x_.groups * kHalves * x_.groups + i % x_.groups;
      const int8_t* first = x_.quantised + group * kGroup;
      const int8_t* low = first + x_.groups * kGroup;
      for (int64_t k = 0; k < kGroup; k++) {
        offsets[i] -= 128 * (kHalves == 1 ? first[k] : kHalfBase * first[k] + low[k]);
      }
    }
  }

  Rows x_;
  int64_t num_rows_;
};

}  // namespace tokenline
