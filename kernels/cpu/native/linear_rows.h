// Rows of activations, as a tile of a linear layer finds them.
#pragma once

#include "panels.h"
#include "simd.h"

// Loops over registers, which must be gone before the compiler allots these.
#define TL_UNROLL _Pragma("GCC unroll 16")

namespace tokenline {

// Where rows lie that are `stride` bytes apart, by three registers for all arrays with that stride.
// Left to itself, the compiler keeps a pointer to each row of each array, most of them in memory:
// int8 weights times 16 rows then took a quarter longer on AVX-512. The four rows of other builds' tiles
// are a tenth faster so.
class Strides {
 public:
  TL_INLINE explicit Strides(int64_t stride) : one_(stride), three_(3 * stride), four_(4 * stride) {}

  // The same, unknown to the compiler, so that nothing is worked out of it before this round of a loop.
  TL_INLINE Strides in_this_round() const {
    Strides copy = *this;
#if defined(TL_AVX512)
    asm volatile("" : "+r"(copy.one_), "+r"(copy.three_), "+r"(copy.four_));
#endif
    return copy;
  }

  template <class T>
  TL_INLINE const T* from(const T* first, int row) const {
    const auto* p = reinterpret_cast<const char*>(first);
    for (; row >= 4; row -= 4) p += four_;
    p += row == 3 ? three_ : row * one_;
    return reinterpret_cast<const T*>(p);
  }

 private:
  int64_t one_, three_, four_;
};

// Rows of a group's activations.
struct GroupRows {
  const int8_t* first;
  const Strides& strides;

  TL_INLINE const int8_t* quad(int row, int quad) const {
    return strides.from(first, row) + quad * 4;
  }
};

}  // namespace tokenline
