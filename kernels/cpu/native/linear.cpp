// The op out (+)= in · weightᵀ + bias.
#include "linear_stage.h"

namespace tokenline {
namespace {

template <class Format>
class PlainStage : public LinearStage<Format> {
  using Base = LinearStage<Format>;
  using typename Base::Products;

 public:
  PlainStage(int32_t count, const TlRows& in, const TlMatrix& weight, bool adds, float* out,
             int64_t stride)
      : Base(count, in, weight, num_panels(weight.rows), 1),
        adds_(adds),
        out_(out),
        stride_(stride) {}

 private:
  Span weights_of(const Block& block, int piece) const override {
    if (piece > 0) return {};
    return this->panels(block.first_unit, block.last_unit - block.first_unit);
  }

  void work(const Block& block, const Products& products, float*) const override {
    for (int64_t index = block.first_unit; index < block.last_unit; index++) {
      float* first = out_ + block.first_row * stride_ + index * kPanelRows;
      products.multiply_by(
          this->panel(index),
          [&](int64_t row, int num_rows) TL_INLINE_LAMBDA {
            for (int r = 0; r < num_rows; r++) __builtin_prefetch(first + (row + r) * stride_, 1);
          },
          [&](int64_t row, const auto& tile)
              TL_INLINE_LAMBDA { store_tile(tile, index, first + row * stride_); });
    }
  }

  template <int R>
  TL_INLINE void store_tile(const F32x16 (&products)[R], int64_t index, float* out) const {
    const TlMatrix& weight = this->weight();
    const int64_t first = index * kPanelRows, count = weight.rows - first;
    const F32x16 bias = weight.bias ? load_some(weight.bias + first, count) : zero();
    TL_UNROLL
    for (int r = 0; r < R; r++) {
      float* place = out + r * stride_;
      F32x16 y = products[r];
      if (weight.bias) y = y + bias;
      if (adds_) y = y + load_some(place, count);
      store_some(place, y, count);
    }
  }

  bool adds_;
  float* out_;
  int64_t stride_;
};

}  // namespace
}  // namespace tokenline

using namespace tokenline;

int32_t tl_add_linear(TlProgram* program, int32_t count, TlRows in, const TlMatrix* weight,
                      int32_t adds, float* out, int64_t out_stride) {
  return guarded([&] {
    program->begin_op("linear");
    add_linear_stage<PlainStage>(program, count, in, *weight, adds != 0, out, out_stride);
  });
}
