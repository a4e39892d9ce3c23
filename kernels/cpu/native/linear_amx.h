// A tile of a linear layer by AMX: sixteen rows times a group of a panel in one instruction.
//
// A group's values lie in a panel as the instruction wants them, four columns of 16 rows after the
// other, so that only 4-bit ones have to be unpacked first. What it gives are integers, group by
// group: they go through memory, since a tile's registers can only be stored, and become floats by
// the chain of linear_tiles.h. So all bits are those of the other builds.
//
// The chain has four operations for 16 outputs of a group and is what bounds this, not the dot
// products. Those of a batch of groups are taken first, and then added up: taking turns group by
// group, each waited for the other's loads and stores, and all took a fifth longer.
#pragma once

#include <optional>

#include "linear_block.h"

#if defined(TL_AMX)

namespace tokenline {

constexpr int kTileRegisterRows = 16;
// With fewer rows, the vectors' dot products are faster: 4-bit weights would be unpacked for too few.
constexpr int64_t fewest_tile_rows(bool is_4_bit) { return is_4_bit ? 32 : 12; }

// The tile registers by what they hold: of a whole tile, and of one with the rows that are left.
enum class Tile { kDots, kRows, kWeights, kDotsLeft, kRowsLeft };

// Shapes the tile registers of this thread for `num_rows` rows, and gives them up at the end: they
// make a change of threads dearer.
class TileRegisters {
 public:
  explicit TileRegisters(int64_t num_rows) {
    const auto left = static_cast<uint8_t>(num_rows % kTileRegisterRows);
    Shapes shapes = {};
    shapes.palette = 1;
    shapes.set(Tile::kDots, kTileRegisterRows, kPanelRows * 4);
    shapes.set(Tile::kRows, kTileRegisterRows, kGroup);
    shapes.set(Tile::kWeights, kGroup / 4, kQuadBytes);
    if (left) {
      shapes.set(Tile::kDotsLeft, left, kPanelRows * 4);
      shapes.set(Tile::kRowsLeft, left, kGroup);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  // What ldtilecfg reads.
  struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];

    void set(Tile tile, uint8_t num_rows, uint16_t bytes) {
      rows[static_cast<int>(tile)] = num_rows;
      bytes_of_row[static_cast<int>(tile)] = bytes;
    }
  };
  static_assert(sizeof(Shapes) == 64);
};

// Not the compiler's own intrinsics: GCC 12 does not know what memory they read, and leaves out stores
// to it.
#define TL_TILE(tile) "i"(static_cast<int>(tile))
template <Tile tile>
TL_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : TL_TILE(tile));
}
template <Tile tile>
TL_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0"
               :
               : TL_TILE(tile), "r"(from), "r"(stride)
               : "memory");
}
template <Tile tile>
TL_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)"
               :
               : TL_TILE(tile), "r"(to), "r"(stride)
               : "memory");
}
template <Tile dots, Tile rows>
TL_INLINE void tile_multiply() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : TL_TILE(dots), TL_TILE(rows), TL_TILE(Tile::kWeights));
}
#undef TL_TILE

TL_INLINE I32x16 load_dots(const int32_t* dots, int row) {
  return {_mm512_load_si512(dots + row * kPanelRows)};
}

template <Tile dots, Tile rows>
TL_INLINE void tile_dots(const int8_t* x, int64_t stride, int32_t* to) {
  tile_zero<dots>();
  tile_load<rows>(x, stride);
  tile_multiply<dots, rows>();
  tile_store<dots>(to, kPanelRows * 4);
}

// A panel's 4-bit values as int8, [groups][quads][kQuadBytes].
TL_INLINE void unpack_panel(const uint8_t* values, int64_t stride, int64_t groups, int8_t* to) {
  const __m512i low_halves = _mm512_set1_epi8(15);
  for (int64_t g = 0; g < groups; g++, values += stride) {
    TL_UNROLL
    for (int part = 0; part < 4; part++, to += 2 * kQuadBytes) {
      const __m512i both = _mm512_loadu_si512(values + part * kQuadBytes);
      _mm512_storeu_si512(to, _mm512_and_si512(both, low_halves));
      _mm512_storeu_si512(to + kQuadBytes,
                          _mm512_and_si512(_mm512_srli_epi16(both, 4), low_halves));
    }
  }
}

// A panel's values as the tile registers take them: from group to group `stride` bytes.
struct TileWeights {
  const int8_t* values;
  int64_t stride;
};

// Products of a panel with R rows: sixteen, or as many as are left.
template <class Format, int R>
__attribute__((noinline)) void multiply_tile(const uint8_t* panel, TileWeights weights,
                                             const QuantisedRows<Format::kHalves>& x, Ahead ahead,
                                             F32x16 (&products)[R]) {
  constexpr int kHalves = Format::kHalves;
  constexpr Tile kInto = R == kTileRegisterRows ? Tile::kDots : Tile::kDotsLeft;
  constexpr Tile kFrom = R == kTileRegisterRows ? Tile::kRows : Tile::kRowsLeft;
  // So many that they stay in the first-level cache.
  constexpr int64_t kBatch = 12 / kHalves;
  alignas(64) int32_t dots[kBatch][kHalves][R * kPanelRows];
  const int64_t low_half = x.groups * kGroup;
  const Strides to_floats(x.groups * 4);
  F32x16 sums[R];
  TL_UNROLL
  for (int r = 0; r < R; r++) sums[r] = zero();
  for (int64_t first = 0; first < x.groups; first += kBatch) {
    const int64_t count = std::min(kBatch, x.groups - first);
    for (int64_t i = 0; i < count; i++) {
      tile_load<Tile::kWeights>(weights.values + (first + i) * weights.stride, kQuadBytes);
      const int8_t* rows = x.quantised + (first + i) * kGroup;
      for (int half = 0; half < kHalves; half++) {
        tile_dots<kInto, kFrom>(rows + half * low_half, kHalves * low_half, dots[i][half]);
      }
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t g = first + i;
      const Strides floats = to_floats.in_this_round();
      const uint8_t* group = panel + g * Format::kStepBytes;
      ahead.fetch(g);
      const F32x16 scale = Format::scale(group), minimum = Format::minimum(group);
      TL_UNROLL
      for (int r = 0; r < R; r++) {
        I32x16 dot = load_dots(dots[i][0], r);
        if constexpr (kHalves == 2) dot = times_half_base(dot) + load_dots(dots[i][1], r);
        sums[r] = fma(to_float(dot), scale * broadcast(*floats.from(x.scales + g, r)), sums[r]);
        if (Format::kHasMinima) {
          sums[r] = fma(minimum, broadcast(*floats.from(x.sums + g, r)), sums[r]);
        }
      }
    }
  }
  TL_UNROLL
  for (int r = 0; r < R; r++) products[r] = sums[r];
}

// BlockProducts for quantised rows, where there are enough of them.
template <class Format>
class TileProducts {
 public:
  using Rows = typename Format::Rows;

  TileProducts(const Rows& x, int64_t num_rows, void* memory)
      : x_(x), num_rows_(num_rows), unpacked_(static_cast<int8_t*>(memory)) {
    if (num_rows >= fewest_tile_rows(Format::kIs4Bit)) {
      registers_.emplace(num_rows);
    } else {
      few_.emplace(x, num_rows, memory);
    }
  }

  static size_t memory_bytes(int64_t most_rows, int64_t groups) {
    const int64_t unpacked = Format::kIs4Bit ? groups * kPanelRows * kGroup : 0;
    return std::max(static_cast<size_t>(unpacked),
                    BlockProducts<Format>::memory_bytes(most_rows, groups));
  }

  template <class Prepare, class Take>
  TL_INLINE void multiply_by(const uint8_t* panel, const Prepare& prepare, const Take& take) const {
    if (few_) return few_->multiply_by(panel, prepare, take);
    const TileWeights weights = tile_weights(panel);
    const int64_t num_tiles = (num_rows_ + kTileRegisterRows - 1) / kTileRegisterRows;
    const auto multiply = [&](int64_t row, auto count) TL_INLINE_LAMBDA {
      F32x16 products[decltype(count)::value];
      prepare(row, count);
      const Ahead ahead = share_of_next<Format>(panel, x_, row / kTileRegisterRows, num_tiles);
      multiply_tile<Format>(panel, weights, x_.from(row), ahead, products);
      take(row, products);
    };
    int64_t row = 0;
    for (; row + kTileRegisterRows <= num_rows_; row += kTileRegisterRows) {
      multiply(row, std::integral_constant<int, kTileRegisterRows>{});
    }
    if (row < num_rows_) {
      with_rows<kTileRegisterRows - 1>(num_rows_ - row, [&](auto rows) { multiply(row, rows); });
    }
  }

 private:
  TileWeights tile_weights(const uint8_t* panel) const {
    const uint8_t* values = panel + Format::kLayout.scales;
    if constexpr (Format::kIs4Bit) {
      unpack_panel(values, Format::kStepBytes, x_.groups, unpacked_);
      return {unpacked_, kPanelRows * kGroup};
    } else {
      return {reinterpret_cast<const int8_t*>(values), Format::kStepBytes};
    }
  }

  Rows x_;
  int64_t num_rows_;
  int8_t* unpacked_;
  std::optional<TileRegisters> registers_;
  std::optional<BlockProducts<Format>> few_;
};

}  // namespace tokenline

#endif
