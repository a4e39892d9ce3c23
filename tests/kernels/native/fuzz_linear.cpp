// Fuzzes packing, unpacking, linear layers of every format, gated ones, and the embedding.
#include <cmath>

#include "fuzz_rows.h"

namespace fuzz {
namespace {

struct Source {
  const char* name;
  int32_t format, kind;
  int64_t multiple_of;   // what columns are a multiple of
  int64_t block_columns, block_bytes;
  int num_halves;        // float16 values at a block's beginning
};

constexpr Source kSources[] = {
    {"q4_0", TL_Q4, TL_SOURCE_Q4_0, 32, 32, 18, 1},
    {"q4_1", TL_Q4, TL_SOURCE_Q4_1, 32, 32, 20, 2},
    {"q4_k", TL_Q4_WIDE, TL_SOURCE_Q4_K, 256, 256, 144, 2},
    {"q8_0", TL_Q8, TL_SOURCE_Q8_0, 32, 32, 34, 1},
    {"f32_as_q8", TL_Q8, TL_SOURCE_F32, 1, 1, 4, 0},
    {"f16_as_q8", TL_Q8, TL_SOURCE_F16, 1, 1, 2, 1},
    {"bf16_as_q8", TL_Q8, TL_SOURCE_BF16, 1, 1, 2, 0},
    {"f16", TL_F16, TL_SOURCE_F16, 1, 1, 2, 1},
    {"bf16", TL_BF16, TL_SOURCE_BF16, 1, 1, 2, 0},
    {"f32", TL_F32, TL_SOURCE_F32, 1, 1, 4, 0},
};

bool is_quantised(int32_t format) {
  return format == TL_Q4 || format == TL_Q4_WIDE || format == TL_Q8;
}

// A float16 of ordinary size, now and then zero, denormal or very large.
uint16_t random_half(Random& random) {
  const uint16_t sign = random.coin() ? 0x8000 : 0;
  const int64_t fraction = random.integer(0, 0x3ff);
  switch (random.integer(0, 30)) {
    case 0: return sign;
    case 1: return static_cast<uint16_t>(sign | fraction);
    case 2: return sign | 0x6bff;  // eight times that fits too
    default: return static_cast<uint16_t>(sign | random.integer(8, 16) << 10 | fraction);
  }
}

// The bytes of one row as a file holds them.
void fill_source_row(Random& random, const Source& source, int64_t columns, uint8_t* row) {
  if (source.kind == TL_SOURCE_F32) {
    const int64_t kind = random.coin() ? 0 : random.integer(0, 4);
    for (int64_t i = 0; i < columns; i++) {
      const float value = random.value(kind);
      std::memcpy(row + 4 * i, &value, 4);
    }
    return;
  }
  for (int64_t block = 0; block < columns / source.block_columns; block++) {
    uint8_t* bytes = row + block * source.block_bytes;
    for (int64_t i = 0; i < source.block_bytes; i++) {
      bytes[i] = static_cast<uint8_t>(random.integer(0, 255));
    }
    for (int half = 0; half < source.num_halves; half++) {
      const uint16_t value = random_half(random);
      std::memcpy(bytes + 2 * half, &value, 2);
    }
    if (source.kind == TL_SOURCE_BF16) {
      const float value = random.value(random.integer(0, 4));
      std::memcpy(bytes, reinterpret_cast<const uint8_t*>(&value) + 2, 2);
    }
  }
}

// A packed matrix of random rows, some of them packed apart, in an order of their own.
class PackedMatrix {
 public:
  PackedMatrix(Random& random, const Source& source, int64_t rows, int64_t columns, bool has_bias)
      : data_(tl_packed_bytes(source.format, rows, columns)), bias_(has_bias ? rows : 0) {
    const int64_t stride = columns / source.block_columns * source.block_bytes;
    Buffer<uint8_t> bytes(rows * stride);
    Buffer<int64_t> order(rows);
    for (int64_t row = 0; row < rows; row++) {
      fill_source_row(random, source, columns, bytes.data() + row * stride);
      order[row] = rows - 1 - row;
    }
    const int64_t cut = random.integer(0, rows / 16) * 16;
    const bool in_order = random.coin();
    for (const auto& [first, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, rows}}) {
      if (first == end) continue;
      const int32_t status =
          tl_pack(source.format, source.kind, bytes.data() + (in_order ? first * stride : 0), stride,
                  in_order ? nullptr : order.data() + first, first, end - first, rows, columns,
                  data_.data());
      check(status == 0, std::string(source.name) + ": can be packed");
    }
    random.fill_rows(bias_.data(), 1, bias_.size(), bias_.size(), 1);
    matrix_ = {source.format, rows, columns, data_.data(), has_bias ? bias_.data() : nullptr};
  }

  const TlMatrix* get() const { return &matrix_; }

  void add_to(Digest& digest) const {
    digest.add_bytes(data_.data(), data_.size());
    Buffer<float> row(matrix_.columns);
    for (int64_t i = 0; i < matrix_.rows; i++) {
      tl_unpack(&matrix_, i, 1, row.data());
      digest.add(row.data(), row.size());
    }
  }

 private:
  Buffer<uint8_t> data_;
  Buffer<float> bias_;
  TlMatrix matrix_;
};

int64_t random_columns(Random& random, const Source& source) {
  const int64_t most = source.multiple_of == 256 ? 3 : 600 / source.multiple_of;
  return random.integer(1, most) * source.multiple_of;
}

// Adds an op behind what quantises its rows, where the format takes them quantised.
struct Quantised {
  Quantised(Random& random, int64_t num_rows, int64_t columns)
      : rows(num_rows, columns, false, random_halves(random)) {}

  TlRows of(TlProgram* program, int32_t format, const float* x, int64_t stride, int64_t columns) {
    if (!is_quantised(format)) {
      TlRows values = {};
      values.values = const_cast<float*>(x);
      values.stride = stride;
      return values;
    }
    tl_add_quantise(program, TL_TOKENS, x, stride, columns, rows.rows());
    return rows.rows();
  }

  Output rows;
};

void fuzz_one_linear(Pools& pools, Random& random, const Source& source) {
  const int64_t rows = random.integer(1, 200), columns = random_columns(random, source);
  const PackedMatrix matrix(random, source, rows, columns, random.coin());
  {
    Digest digest(std::string("pack ") + source.name);
    matrix.add_to(digest);
  }
  RowsOp op;
  op.name = std::string("linear ") + source.name;
  op.num_rows = random.integer(1, 70);
  op.in_width = columns;
  op.out_width = rows;
  op.has_values = true;
  op.halves = 0;
  const bool adds = random.coin();
  op.start.resize(static_cast<size_t>(op.num_rows * rows));
  random.fill_rows(op.start.data(), op.num_rows, rows, rows, 1);
  Quantised quantised(random, op.num_rows, columns);
  op.add = [&](TlProgram* program, int64_t, const float* x, int64_t stride, TlRows out) {
    const TlRows in = quantised.of(program, source.format, x, stride, columns);
    tl_add_linear(program, TL_TOKENS, in, matrix.get(), adds, out.values, out.stride);
  };
  fuzz_rows_op(pools, random, op);
}

void fuzz_one_gated_linear(Pools& pools, Random& random, const Source& source) {
  const int64_t width = random.integer(1, 4) * 32, columns = random_columns(random, source);
  const PackedMatrix matrix(random, source, 2 * width, columns, false);
  RowsOp op;
  op.name = std::string("gated_linear ") + source.name;
  op.num_rows = random.integer(1, 70);
  op.in_width = columns;
  op.out_width = width;
  const int64_t forms = random.integer(0, 2);
  op.has_values = forms != 0;
  op.halves = forms != 1 ? random_halves(random) : 0;
  Quantised quantised(random, op.num_rows, columns);
  op.add = [&](TlProgram* program, int64_t, const float* x, int64_t stride, TlRows out) {
    const TlRows in = quantised.of(program, source.format, x, stride, columns);
    tl_add_gated_linear(program, TL_TOKENS, in, matrix.get(), out);
  };
  fuzz_rows_op(pools, random, op);
}

void fuzz_one_embedding(Pools& pools, Random& random, const Source& source) {
  const int64_t rows = random.integer(1, 100), columns = random_columns(random, source);
  const PackedMatrix matrix(random, source, rows, columns, false);
  const int64_t num_tokens = random.integer(1, 40);
  Buffer<int32_t> ids(num_tokens);
  for (int64_t i = 0; i < num_tokens; i++) ids[i] = static_cast<int32_t>(random.integer(0, rows - 1));
  Output out(num_tokens, columns, true, 0);
  run_program(
      pools.many,
      [&](TlProgram* program) {
        tl_add_embedding(program, TL_TOKENS, ids.data(), matrix.get(), out.rows());
      },
      {num_tokens});
  Buffer<float> expected(columns);
  for (int64_t i = 0; i < num_tokens; i++) {
    tl_unpack(matrix.get(), ids[i], 1, expected.data());
    check(are_equal(expected.data(), out.rows_from(i).values, columns), "an embedding is its row");
  }
  Digest digest(std::string("embedding ") + source.name);
  out.add_to(digest);
}

}  // namespace

void fuzz_linear(Pools& pools, int rounds) {
  for (int round = 0; round < rounds; round++) {
    for (const Source& source : kSources) {
      Random random(static_cast<uint64_t>(round));
      fuzz_one_linear(pools, random, source);
      fuzz_one_gated_linear(pools, random, source);
      fuzz_one_embedding(pools, random, source);
    }
  }
}

}  // namespace fuzz
