// Integer dot products of a group of 32 columns: panels' weights times rows of activations.
//
// The only part of a linear layer that is written per instruction set: sums of integers are exact,
// so that every way to them gives the same bits. Each build says how much of it fits registers:
//
//   rows_per_tile     rows that share one read of the weights, by the halves of their activations
//   kOffsetsInt8      int8 weights are taken as unsigned, w + 128; the sums start at -128 · Σx
//
// `sums` come as what the dot products are to be added to: zeros, but for kOffsetsInt8.
#pragma once

#if defined(TL_AVX512)
#include "linear_dots_avx512.h"
#elif defined(TL_AVX2)
#include "linear_dots_avx2.h"
#elif defined(TL_NEON)
#include "linear_dots_neon.h"
#else
#include "linear_dots_plain.h"
#endif
