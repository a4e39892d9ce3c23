// The op silu(in · gateᵀ) · (in · upᵀ): a gate panel and its up panel in one tile.
#include "linear_stage.h"
#include "quantise.h"

namespace tokenline {
namespace {

// A unit of work is one group of outputs: two panels of gates and two of ups.
template <class Format>
class GatedStage : public LinearStage<Format> {
  using Base = LinearStage<Format>;
  using typename Base::Rows;

 public:
  GatedStage(int32_t count, const TlRows& in, const TlMatrix& weight, const TlRows& out)
      : Base(count, in, weight, weight.rows / 2 / kGroup, 2 * kGroup / kPanelRows), out_(out) {}

 private:
  size_t buffer_size() const override { return kBlockRows * kGroup; }

  void work(const Block& block, const Rows& x, float* buffer) const override {
    for (int64_t group = block.first_tile; group < block.last_tile; group++) {
      for (int half = 0; half < kGroup / kPanelRows; half++) {
        multiply_panel(group * (kGroup / kPanelRows) + half, block, x, buffer + half * kPanelRows);
      }
      for (int64_t row = block.first_row; row < block.last_row; row++) {
        write_group(row, group, buffer + (row - block.first_row) * kGroup);
      }
    }
  }

  // Gates of panel `panel` and what they gate, into 16 columns of the buffer.
  void multiply_panel(int64_t panel, const Block& block, const Rows& x, float* buffer) const {
    Panels<2> panels;
    this->place_panel(panels, 0, panel);
    this->place_panel(panels, 1, panel + this->weight().rows / 2 / kPanelRows);
    panels.ahead = this->panel_bytes();
    for_each_row_tile<Format::kTileRows>(
        0, block.last_row - block.first_row, [&](int64_t row, auto count) {
          constexpr int R = decltype(count)::value;
          F32x16 products[2][R];
          multiply<Format>(panels, x.from(row), products);
          TL_UNROLL
          for (int r = 0; r < R; r++) {
            store(buffer + (row + r) * kGroup, silu(products[0][r]) * products[1][r]);
          }
          panels.ahead = 0;
        });
  }

  void write_group(int64_t row, int64_t group, const float* values) const {
    const F32x16 first = load(values), second = load(values + kLanes);
    if (out_.values) {
      float* place = out_.values + row * out_.stride + group * kGroup;
      store(place, first);
      store(place + kLanes, second);
    }
    if (out_.quantised) {
      const int64_t place = row * (this->weight().rows / 2 / kGroup) + group;
      quantise_group(first, second, out_.quantised + place * kGroup, out_.scales + place,
                     out_.sums + place);
    }
  }

  TlRows out_;
};

}  // namespace
}  // namespace tokenline

using namespace tokenline;

void tl_add_gated_linear(TlProgram* program, int32_t count, TlRows in, const TlMatrix* gate_up,
                         TlRows out) {
  program->begin_op("gated_linear");
  add_linear_stage<GatedStage>(program, gate_up->format, count, in, *gate_up, out);
}
