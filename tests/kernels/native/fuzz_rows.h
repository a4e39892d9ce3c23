// Any op that takes rows and gives rows: the same bits alone, among others, and on any threads.
#pragma once

#include "fuzz.h"

namespace fuzz {

// Memory for the rows of an op's result, in the forms that it is asked for.
class Output {
 public:
  // `halves` as TlRows has them; 0: not quantised.
  Output(int64_t num_rows, int64_t width, bool has_values, int32_t halves);

  TlRows rows() const;
  // Rows from `first` on, for an op that is to write just these.
  TlRows rows_from(int64_t first) const;
  void add_to(Digest& digest) const;
  bool has_equal_row(const Output& other, int64_t row) const;
  // Row `to` becomes what row `from` of another of the same forms is.
  void copy_row(int64_t to, const Output& other, int64_t from);
  float* values() const { return values_.data(); }
  int64_t stride() const { return width_; }

 private:
  int64_t row_bytes() const { return halves_ * groups_ * 32; }

  int64_t num_rows_, width_, groups_;
  bool has_values_;
  int32_t halves_;
  Buffer<float> values_;
  Buffer<int8_t> quantised_;
  Buffer<float> scales_, sums_;
};

// int8, or 16 bits.
inline int32_t random_halves(Random& random) { return random.coin() ? 1 : 2; }

struct RowsOp {
  std::string name;
  int64_t num_rows;
  int64_t in_width;
  int64_t out_width;
  bool has_values;
  int32_t halves;  // of the result, as Output has them
  // Adds the op for rows from `first` on, reading x (row `first`, with this stride) and writing
  // `out`, whose values hold `start` before, where there is one.
  std::function<void(TlProgram*, int64_t first, const float* x, int64_t stride, TlRows out)> add;
  // What the values of the result are before it runs: [num_rows, out_width], or empty.
  std::vector<float> start = {};
};

// Runs `op` on random rows: on one thread, on many, a single row, and with a NaN in another row.
void fuzz_rows_op(Pools& pools, Random& random, const RowsOp& op);

}  // namespace fuzz
