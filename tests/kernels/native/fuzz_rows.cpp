// Fuzzes the ops that take each row by itself.
#include "fuzz_rows.h"

namespace fuzz {
namespace {

RowsOp base(Random& random, const std::string& name, bool always_has_values = false) {
  RowsOp op;
  op.name = name;
  op.num_rows = random.integer(1, 40);
  op.in_width = op.out_width = random.integer(1, 700);
  const int64_t forms = random.integer(0, 2);
  op.has_values = always_has_values || forms != 0;
  op.halves = !always_has_values && forms != 1 ? random_halves(random) : 0;
  return op;
}

void fuzz_norms(Pools& pools, Random& random) {
  RowsOp op = base(random, "rms_norm");
  Buffer<float> weight(op.in_width);
  random.fill_rows(weight.data(), 1, op.in_width, op.in_width, 1);
  op.add = [&](TlProgram* program, int64_t, const float* x, int64_t stride, TlRows out) {
    tl_add_rms_norm(program, TL_TOKENS, x, stride, op.in_width, weight.data(), 1e-5f, out);
  };
  fuzz_rows_op(pools, random, op);

  op.name = "add_rms_norm";
  const int64_t size = op.num_rows * op.in_width;
  Buffer<float> before(size), residual(size);
  random.fill_rows(before.data(), op.num_rows, op.in_width, op.in_width);
  op.add = [&](TlProgram* program, int64_t first, const float* x, int64_t stride, TlRows out) {
    std::memcpy(residual.data(), before.data(), static_cast<size_t>(size) * sizeof(float));
    tl_add_add_rms_norm(program, TL_TOKENS, x, stride, residual.data() + first * op.in_width,
                        op.in_width, op.in_width, weight.data(), 1e-5f, out);
  };
  fuzz_rows_op(pools, random, op);
}

void fuzz_quantise(Pools& pools, Random& random) {
  RowsOp op = base(random, "quantise");
  op.halves = random_halves(random);
  op.add = [&](TlProgram* program, int64_t, const float* x, int64_t stride, TlRows out) {
    tl_add_quantise(program, TL_TOKENS, x, stride, op.in_width, out);
  };
  fuzz_rows_op(pools, random, op);
}

void fuzz_silu_and_mul(Pools& pools, Random& random) {
  RowsOp op = base(random, "silu_and_mul");
  op.in_width = 2 * op.out_width;
  op.add = [&](TlProgram* program, int64_t, const float* x, int64_t stride, TlRows out) {
    tl_add_silu_and_mul(program, TL_TOKENS, x, stride, op.out_width, out);
  };
  fuzz_rows_op(pools, random, op);
}

// Takes rows backwards, values and quantised forms, of which the second come from the first.
void fuzz_take_rows(Pools& pools, Random& random) {
  RowsOp op = base(random, "take_rows");
  Buffer<int32_t> backwards(op.num_rows);
  for (int64_t i = 0; i < op.num_rows; i++) {
    backwards[i] = static_cast<int32_t>(op.num_rows - 1 - i);
  }
  const int64_t width = op.in_width;
  Random rows_random(random.bits());
  Buffer<float> source(op.num_rows * width);
  rows_random.fill_rows(source.data(), op.num_rows, width, width);
  const int32_t halves = op.halves ? op.halves : 1;
  Output in(op.num_rows, width, true, halves);
  run_program(
      pools.one,
      [&](TlProgram* program) {
        tl_add_quantise(program, TL_TOKENS, source.data(), width, width, in.rows());
      },
      {op.num_rows});
  Output out(op.num_rows, width, op.has_values, op.halves);
  run_program(
      pools.many,
      [&](TlProgram* program) {
        tl_add_take_rows(program, TL_KEPT_TOKENS, backwards.data(), in.rows(), width, out.rows());
      },
      {0, op.num_rows});
  Digest digest(op.name);
  out.add_to(digest);
}

}  // namespace

void fuzz_rows(Pools& pools, int rounds) {
  for (int round = 0; round < rounds; round++) {
    Random random(static_cast<uint64_t>(round));
    fuzz_norms(pools, random);
    fuzz_quantise(pools, random);
    fuzz_silu_and_mul(pools, random);
    fuzz_take_rows(pools, random);
  }
}

}  // namespace fuzz
