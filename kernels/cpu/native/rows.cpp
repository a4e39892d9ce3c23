// Ops that take each row by itself: embedding, norms, quantisation, gathering, silu · mul.
#include <cstring>
#include <utility>

#include "api.h"
#include "panels.h"
#include "program.h"
#include "quantise.h"
#include "simd.h"

namespace tokenline {
namespace {

// Rows that one thread takes at a time.
constexpr int64_t kRowsPerChunk = 4;

// A stage that calls `row(index, buffer)` for each row of a count; the buffer has `buffer_size`
// floats.
template <class Row>
class RowStage : public Stage {
 public:
  RowStage(int32_t count, int64_t buffer_size, Row row)
      : count_(count), buffer_size_(buffer_size), row_(std::move(row)) {}

  int64_t num_chunks(const int64_t* counts) const override {
    return (counts[count_] + kRowsPerChunk - 1) / kRowsPerChunk;
  }

  void run(int64_t chunk, const int64_t* counts, Scratch& scratch) const override {
    float* buffer = scratch.get<float>(static_cast<size_t>(buffer_size_));
    const int64_t first = chunk * kRowsPerChunk;
    const int64_t last = first + kRowsPerChunk < counts[count_] ? first + kRowsPerChunk
                                                                : counts[count_];
    for (int64_t row = first; row < last; row++) row_(row, buffer);
  }

 private:
  int32_t count_;
  int64_t buffer_size_;
  Row row_;
};

template <class Row>
void add_row_op(TlProgram* program, const char* name, int32_t count, int64_t width, Row row) {
  program->begin_op(name);
  const int64_t buffer_size = num_groups(width) * kGroup;
  program->add(std::make_unique<RowStage<Row>>(count, buffer_size, std::move(row)));
}

// Zhang and Sennrich, "Root mean square layer normalization", 2019. The squares are summed in 64
// lanes: 4 accumulators of 16.
void normalise(const float* x, int64_t width, const float* weight, float eps, float* out) {
  F32x16 squares[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < width; i += kLanes) {
    const F32x16 part = load_some(x + i, width - i);
    F32x16& lane = squares[(i / kLanes) % 4];
    lane = fma(part, part, lane);
  }
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const F32x16 scale = broadcast(1.0f / std::sqrt(total / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    store_some(out + i, load_some(x + i, left) * scale * load_some(weight + i, left), left);
  }
}

}  // namespace
}  // namespace tokenline

using namespace tokenline;

void tl_add_embedding(TlProgram* program, int32_t count, const int32_t* ids, const TlMatrix* table,
                      TlRows out) {
  const TlMatrix matrix = *table;
  add_row_op(program, "embedding", count, 0, [=](int64_t row, float*) {
    unpack_row(matrix, ids[row], out.values + row * out.stride);
  });
}

void tl_add_rms_norm(TlProgram* program, int32_t count, const float* x, int64_t stride,
                     int64_t width, const float* weight, float eps, TlRows out) {
  add_row_op(program, "rms_norm", count, width, [=](int64_t row, float* buffer) {
    normalise(x + row * stride, width, weight, eps, buffer);
    write_row(out, row, buffer, width);
  });
}

void tl_add_add_rms_norm(TlProgram* program, int32_t count, const float* x, int64_t stride,
                         float* residual, int64_t residual_stride, int64_t width,
                         const float* weight, float eps, TlRows out) {
  add_row_op(program, "add_rms_norm", count, width, [=](int64_t row, float* buffer) {
    float* sum_row = residual + row * residual_stride;
    for (int64_t i = 0; i < width; i++) sum_row[i] += x[row * stride + i];
    normalise(sum_row, width, weight, eps, buffer);
    write_row(out, row, buffer, width);
  });
}

void tl_add_quantise(TlProgram* program, int32_t count, const float* x, int64_t stride,
                     int64_t width, TlRows out) {
  add_row_op(program, "quantise", count, width, [=](int64_t row, float* buffer) {
    std::memcpy(buffer, x + row * stride, static_cast<size_t>(width) * sizeof(float));
    write_row(out, row, buffer, width);
  });
}

void tl_add_take_rows(TlProgram* program, int32_t count, const int32_t* indices, TlRows in,
                      int64_t width, TlRows out) {
  const int64_t groups = num_groups(width);
  add_row_op(program, "take_rows", count, 0, [=](int64_t row, float*) {
    const int64_t from = indices[row];
    if (in.values && out.values) {
      std::memcpy(out.values + row * out.stride, in.values + from * in.stride,
                  static_cast<size_t>(width) * sizeof(float));
    }
    if (in.quantised && out.quantised) {
      const size_t bytes = static_cast<size_t>(groups) * sizeof(float);
      std::memcpy(out.quantised + row * groups * kGroup, in.quantised + from * groups * kGroup,
                  static_cast<size_t>(groups * kGroup));
      std::memcpy(out.scales + row * groups, in.scales + from * groups, bytes);
      std::memcpy(out.sums + row * groups, in.sums + from * groups, bytes);
    }
  });
}

void tl_add_silu_and_mul(TlProgram* program, int32_t count, const float* gate_up, int64_t stride,
                         int64_t width, TlRows out) {
  add_row_op(program, "silu_and_mul", count, width, [=](int64_t row, float* buffer) {
    const float* gate = gate_up + row * stride;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t left = width - i;
      const F32x16 up = load_some(gate + width + i, left);
      store_some(buffer + i, silu(load_some(gate + i, left)) * up, left);
    }
    write_row(out, row, buffer, width);
  });
}
