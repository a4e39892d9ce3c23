// The op silu(in · gateᵀ) · (in · upᵀ): what a gate panel and its up panel give is never stored.
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
    for (int64_t group = block.first_unit; group < block.last_unit; group++) {
      for (int half = 0; half < kGroup / kPanelRows; half++) {
        multiply_panel(group * (kGroup / kPanelRows) + half, block, x, buffer + half * kPanelRows);
      }
      for (int64_t row = block.first_row; row < block.last_row; row++) {
        write_group(row, group, buffer + (row - block.first_row) * kGroup);
      }
    }
  }

  // Gates of panel `index` and what they gate, into 16 columns of the buffer.
  void multiply_panel(int64_t index, const Block& block, const Rows& x, float* buffer) const {
    const uint8_t* gate_panel = this->panel(index);
    const uint8_t* up_panel = this->panel(index + this->weight().rows / 2 / kPanelRows);
    for_each_row_tile<Format::kTileRows>(
        0, block.last_row - block.first_row, [&](int64_t row, auto count) {
          constexpr int R = decltype(count)::value;
          F32x16 gates[R], ups[R];
          multiply<Format>(gate_panel, x.from(row), gates);
          multiply<Format>(up_panel, x.from(row), ups);
          TL_UNROLL
          for (int r = 0; r < R; r++) {
            store(buffer + (row + r) * kGroup, silu(gates[r]) * ups[r]);
          }
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
      quantise_group(out_, row, group, this->weight().rows / 2 / kGroup, first, second);
    }
  }

  TlRows out_;
};

}  // namespace
}  // namespace tokenline

using namespace tokenline;

int32_t tl_add_gated_linear(TlProgram* program, int32_t count, TlRows in, const TlMatrix* gate_up,
                            TlRows out) {
  return guarded([&] {
    program->begin_op("gated_linear");
    add_linear_stage<GatedStage>(program, count, in, *gate_up, out);
  });
}
