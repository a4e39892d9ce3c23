// The op out (+)= in · weightᵀ + bias.
#include "linear_stage.h"

namespace tokenline {
namespace {

template <class Format>
class PlainStage : public LinearStage<Format> {
  using Base = LinearStage<Format>;
  using typename Base::Rows;

 public:
  PlainStage(int32_t count, const TlRows& in, const TlMatrix& weight, bool adds, float* out,
             int64_t stride)
      : Base(count, in, weight, (num_panels(weight.rows) + kTilePanels - 1) / kTilePanels,
             kTilePanels),
        adds_(adds),
        out_(out),
        stride_(stride) {}

 private:
  void work(const Block& block, const Rows& x, float*) const override {
    for (int64_t tile = block.first_tile; tile < block.last_tile; tile++) {
      const int64_t last_panel = num_panels(this->weight().rows) - 1;
      Panels<kTilePanels> panels;
      for (int p = 0; p < kTilePanels; p++) {
        this->place_panel(panels, p, std::min(tile * kTilePanels + p, last_panel));
      }
      panels.ahead = kTilePanels * this->panel_bytes();
      for_each_row_tile<Format::kTileRows>(
          block.first_row, block.last_row, [&](int64_t row, auto count) {
            constexpr int R = decltype(count)::value;
            float* out = out_ + row * stride_ + tile * kTilePanels * kPanelRows;
            for (int r = 0; r < R; r++) prefetch_outputs(out + r * stride_);
            F32x16 products[kTilePanels][R];
            multiply<Format>(panels, x.from(row - block.first_row), products);
            store_tile(products, tile, out);
            panels.ahead = 0;
          });
    }
  }

  static TL_INLINE void prefetch_outputs(const float* out) {
    for (int p = 0; p < kTilePanels; p++) __builtin_prefetch(out + p * kPanelRows, 1);
  }

  template <int R>
  TL_INLINE void store_tile(const F32x16 (&products)[kTilePanels][R], int64_t tile,
                            float* out) const {
    const TlMatrix& weight = this->weight();
    TL_UNROLL
    for (int p = 0; p < kTilePanels; p++) {
      const int64_t first = (tile * kTilePanels + p) * kPanelRows;
      const int64_t count = weight.rows - first;
      if (count <= 0) return;
      const F32x16 bias = weight.bias ? load_some(weight.bias + first, count) : zero();
      TL_UNROLL
      for (int r = 0; r < R; r++) {
        float* place = out + r * stride_ + p * kPanelRows;
        F32x16 y = products[p][r];
        if (weight.bias) y = y + bias;
        if (adds_) y = y + load_some(place, count);
        store_some(place, y, count);
      }
    }
  }

  bool adds_;
  float* out_;
  int64_t stride_;
};

}  // namespace
}  // namespace tokenline

using namespace tokenline;

void tl_add_linear(TlProgram* program, int32_t count, TlRows in, const TlMatrix* weight,
                   int32_t adds, float* out, int64_t out_stride) {
  program->begin_op("linear");
  add_linear_stage<PlainStage>(program, weight->format, count, in, *weight, adds != 0, out,
                               out_stride);
}
