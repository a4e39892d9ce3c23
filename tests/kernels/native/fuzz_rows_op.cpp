// See fuzz_rows.h.
#include <cmath>

#include "fuzz_rows.h"

namespace fuzz {

Output::Output(int64_t num_rows, int64_t width, bool has_values, int32_t halves)
    : num_rows_(num_rows),
      width_(width),
      groups_((width + 31) / 32),
      has_values_(has_values),
      halves_(halves),
      values_(has_values ? num_rows * width : 0),
      quantised_(num_rows * row_bytes()),
      scales_(halves ? num_rows * groups_ : 0),
      sums_(halves ? num_rows * groups_ : 0) {}

TlRows Output::rows() const { return rows_from(0); }

TlRows Output::rows_from(int64_t first) const {
  TlRows rows = {};
  if (has_values_) {
    rows.values = values_.data() + first * width_;
    rows.stride = width_;
  }
  if (halves_) {
    rows.halves = halves_;
    rows.quantised = quantised_.data() + first * row_bytes();
    rows.scales = scales_.data() + first * groups_;
    rows.sums = sums_.data() + first * groups_;
  }
  return rows;
}

void Output::add_to(Digest& digest) const {
  digest.add(values_.data(), values_.size());
  digest.add_bytes(quantised_.data(), quantised_.size());
  digest.add(scales_.data(), scales_.size());
  digest.add(sums_.data(), sums_.size());
}

bool Output::has_equal_row(const Output& other, int64_t row) const {
  const TlRows a = rows_from(row), b = other.rows_from(row);
  if (has_values_ && !are_equal(a.values, b.values, width_)) return false;
  if (!halves_) return true;
  return std::memcmp(a.quantised, b.quantised, static_cast<size_t>(row_bytes())) == 0 &&
         are_equal(a.scales, b.scales, groups_) && are_equal(a.sums, b.sums, groups_);
}

void Output::copy_row(int64_t to, const Output& other, int64_t from) {
  const TlRows a = rows_from(to), b = other.rows_from(from);
  const auto bytes = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
  if (has_values_) std::memcpy(a.values, b.values, bytes(width_));
  if (!halves_) return;
  std::memcpy(a.quantised, b.quantised, static_cast<size_t>(row_bytes()));
  std::memcpy(a.scales, b.scales, bytes(groups_));
  std::memcpy(a.sums, b.sums, bytes(groups_));
}

void fuzz_rows_op(Pools& pools, Random& random, const RowsOp& op) {
  const int64_t stride = op.in_width + (random.coin() ? 0 : random.integer(1, 40));
  // The last row ends where the memory does.
  Buffer<float> x((op.num_rows - 1) * stride + op.in_width);
  random.fill_rows(x.data(), op.num_rows, stride, op.in_width);
  const auto run = [&](TlPool* pool, Output& out, int64_t first, int64_t num_rows) {
    if (!op.start.empty()) {
      std::memcpy(out.values(), op.start.data(), op.start.size() * sizeof(float));
    }
    const auto add = [&](TlProgram* program) {
      op.add(program, first, x.data() + first * stride, stride, out.rows_from(first));
    };
    run_program(pool, add, {num_rows});
  };
  const auto output = [&] {
    return Output(op.num_rows, op.out_width, op.has_values, op.halves);
  };

  Output expected = output();
  run(pools.one, expected, 0, op.num_rows);
  Digest digest(op.name);
  expected.add_to(digest);

  Output threaded = output();
  run(pools.many, threaded, 0, op.num_rows);
  for (int64_t row = 0; row < op.num_rows; row++) {
    check(threaded.has_equal_row(expected, row), op.name + ": threads make no difference");
  }
  const int64_t chosen = random.integer(0, op.num_rows - 1);
  Output alone = output();
  run(pools.one, alone, chosen, 1);
  check(alone.has_equal_row(expected, chosen), op.name + ": a row alone is as among others");

  x[chosen * stride + random.integer(0, op.in_width - 1)] = NAN;
  Output spoilt = output();
  run(pools.many, spoilt, 0, op.num_rows);
  for (int64_t row = 0; row < op.num_rows; row++) {
    check(row == chosen || spoilt.has_equal_row(expected, row),
          op.name + ": a NaN stays in its row");
  }
}

}  // namespace fuzz
