// Ops that take each row by itself: embedding, norms, quantisation, gathering, silu · mul.
#include "rows.h"

#include <cstring>

#include "panels.h"

namespace tokenline {
namespace {

template <class Row>
void add_row_op(TlProgram* program, const char* name, int32_t count, int64_t work, Row row) {
  program->begin_op(name);
  add_row_stage(program, count, work, 0, std::move(row));
}

// Zhang and Sennrich, "Root mean square layer normalization", 2019.
TL_INLINE void write_normalised(const TlRows& out, int64_t row, const float* x, int64_t width,
                                const float* weight, float inverse) {
  const F32x16 scale = broadcast(inverse);
  write_parts(out, row, width, [=](int64_t column, int64_t left) TL_INLINE_LAMBDA {
    return load_some(x + column, left) * scale * load_some(weight + column, left);
  });
}

}  // namespace
}  // namespace tokenline

using namespace tokenline;

int32_t tl_add_embedding(TlProgram* program, int32_t count, const int32_t* ids,
                         const TlMatrix* table, TlRows out) {
  return guarded([&] {
    const TlMatrix matrix = *table;
    add_row_op(program, "embedding", count, matrix.columns, [=](int64_t row, float*) {
      unpack_row(matrix, ids[row], out.values + row * out.stride);
    });
  });
}

int32_t tl_add_rms_norm(TlProgram* program, int32_t count, const float* x, int64_t stride,
                        int64_t width, const float* weight, float eps, TlRows out) {
  return guarded([&] {
    add_row_op(program, "rms_norm", count, width, [=](int64_t row, float*) {
      const float* from = x + row * stride;
      const auto part = [=](int64_t column, int64_t left) TL_INLINE_LAMBDA {
        return load_some(from + column, left);
      };
      const float inverse = inverse_rms(width, eps, part);
      write_normalised(out, row, from, width, weight, inverse);
    });
  });
}

int32_t tl_add_add_rms_norm(TlProgram* program, int32_t count, const float* x, int64_t stride,
                            float* residual, int64_t residual_stride, int64_t width,
                            const float* weight, float eps, TlRows out) {
  return guarded([&] {
    add_row_op(program, "add_rms_norm", count, 2 * width, [=](int64_t row, float*) {
      const float* from = x + row * stride;
      float* to = residual + row * residual_stride;
      const auto add = [=](int64_t column, int64_t left) TL_INLINE_LAMBDA {
        const F32x16 added = load_some(to + column, left) + load_some(from + column, left);
        store_some(to + column, added, left);
        return added;
      };
      const float inverse = inverse_rms(width, eps, add);
      write_normalised(out, row, to, width, weight, inverse);
    });
  });
}

int32_t tl_add_quantise(TlProgram* program, int32_t count, const float* x, int64_t stride,
                        int64_t width, TlRows out) {
  return guarded([&] {
    add_row_op(program, "quantise", count, width, [=](int64_t row, float*) {
      const float* from = x + row * stride;
      write_parts(out, row, width, [=](int64_t column, int64_t left) TL_INLINE_LAMBDA {
        return load_some(from + column, left);
      });
    });
  });
}

int32_t tl_add_take_rows(TlProgram* program, int32_t count, const int32_t* indices, TlRows in,
                         int64_t width, TlRows out) {
  return guarded([&] {
    const int64_t groups = num_groups(width);
    add_row_op(program, "take_rows", count, width, [=](int64_t row, float*) {
      const int64_t from = indices[row];
      if (in.values && out.values) {
        std::memcpy(out.values + row * out.stride, in.values + from * in.stride,
                    static_cast<size_t>(width) * sizeof(float));
      }
      if (in.quantised && out.quantised) {
        const size_t bytes = static_cast<size_t>(groups) * sizeof(float);
        const int64_t row_bytes = in.halves * groups * kGroup;
        std::memcpy(out.quantised + row * row_bytes, in.quantised + from * row_bytes,
                    static_cast<size_t>(row_bytes));
        std::memcpy(out.scales + row * groups, in.scales + from * groups, bytes);
        std::memcpy(out.sums + row * groups, in.sums + from * groups, bytes);
      }
    });
  });
}

int32_t tl_add_silu_and_mul(TlProgram* program, int32_t count, const float* gate_up, int64_t stride,
                            int64_t width, TlRows out) {
  return guarded([&] {
    add_row_op(program, "silu_and_mul", count, 4 * width, [=](int64_t row, float*) {
      const float* gate = gate_up + row * stride;
      write_parts(out, row, width, [=](int64_t column, int64_t left) TL_INLINE_LAMBDA {
        return silu(load_some(gate + column, left)) * load_some(gate + width + column, left);
      });
    });
  });
}
