// The dot products of linear_dots.h on any machine.
#pragma once

#include "linear_rows.h"

namespace tokenline {

constexpr int rows_per_tile(int halves) { return 4 / halves; }
constexpr int kFloatRowsPerTile = 2;
constexpr bool kOffsetsInt8 = false;

// Adds `num_quads` quads, whose products' sums fit into 16 bits.
template <int num_quads, int R>
TL_INLINE void add_quads(const int8_t* weights, GroupRows x, int first_quad,
                         I32x16 (&sums)[R]) {
  for (int r = 0; r < R; r++) {
    int16_t columns[kQuadBytes] = {};
    for (int quad = 0; quad < num_quads; quad++) {
      int16_t two[8];  // the quad twice: as many lanes as the smallest vectors have
      for (int i = 0; i < 8; i++) two[i] = x.quad(r, first_quad + quad)[i % 4];
      const int8_t* w = weights + quad * kQuadBytes;
      for (int i = 0; i < kQuadBytes; i += 8) {
        for (int k = 0; k < 8; k++) {
          columns[i + k] = static_cast<int16_t>(columns[i + k] + w[i + k] * two[k]);
        }
      }
    }
    for (int lane = 0; lane < kLanes; lane++) {
      const int16_t* four = columns + lane * 4;
      sums[r].v[lane] += four[0] + four[1] + four[2] + four[3];
    }
  }
}

template <int R>
TL_INLINE void add_dots_q4(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  int8_t quads[kPanelRows * kGroup];
  for (int part = 0; part < 4; part++) {
    for (int i = 0; i < kQuadBytes; i++) {
      const uint8_t both = values[part * kQuadBytes + i];
      quads[2 * part * kQuadBytes + i] = static_cast<int8_t>(both & 15);
      quads[(2 * part + 1) * kQuadBytes + i] = static_cast<int8_t>(both >> 4);
    }
  }
  add_quads<8>(quads, x, 0, sums);
}

template <int R>
TL_INLINE void add_dots_q8(const uint8_t* values, GroupRows x, I32x16 (&sums)[R]) {
  for (int quad = 0; quad < 8; quad += 2) {
    const auto* weights = reinterpret_cast<const int8_t*>(values + quad * kQuadBytes);
    add_quads<2>(weights, x, quad, sums);
  }
}

}  // namespace tokenline
