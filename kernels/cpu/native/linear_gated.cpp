// The op silu(in · gateᵀ) · (in · upᵀ): what a gate panel and its up panel give is never stored.
#include "linear_stage.h"
#include "quantise.h"

namespace tokenline {
namespace {

// A unit of work is one group of outputs: two panels of gates and two of ups.
template <class Format>
class GatedStage : public LinearStage<Format> {
  using Base = LinearStage<Format>;
  using typename Base::Products;

 public:
  GatedStage(int32_t count, const TlRows& in, const TlMatrix& weight, const TlRows& out)
      : Base(count, in, weight, weight.rows / 2 / kGroup, 2 * kGroup / kPanelRows), out_(out) {}

 private:
  static constexpr int64_t kPanelsPerGroup = kGroup / kPanelRows;

  // As many panels of ups, which follow all of the gates.
  int64_t num_gates() const { return this->weight().rows / 2 / kPanelRows; }

  size_t buffer_floats() const override { return kBlockRows * kGroup; }

  Span weights_of(const Block& block, int piece) const override {
    if (piece > 1) return {};
    const int64_t first = piece * num_gates() + block.first_unit * kPanelsPerGroup;
    return this->panels(first, (block.last_unit - block.first_unit) * kPanelsPerGroup);
  }

  void work(const Block& block, const Products& products, float* buffer) const override {
    for (int64_t group = block.first_unit; group < block.last_unit; group++) {
      for (int64_t half = 0; half < kPanelsPerGroup; half++) {
        const int64_t index = group * kPanelsPerGroup + half;
        float* place = buffer + half * kPanelRows;
        multiply(products, index, place, [](F32x16 gate, F32x16) { return gate; });
        multiply(products, index + num_gates(), place,
                 [](F32x16 up, F32x16 gate) { return silu(gate) * up; });
      }
      for (int64_t row = 0; row < block.num_rows; row++) {
        write_group(block.first_row + row, group, buffer + row * kGroup);
      }
    }
  }

  // Puts what `join` makes of products with a panel, and of what is there, into 16 columns of the buffer
  // [rows][kGroup].
  template <class Join>
  void multiply(const Products& products, int64_t index, float* columns, Join join) const {
    products.multiply_by(
        this->panel(index), [](int64_t, int) {},
        [&](int64_t row, const auto& tile) TL_INLINE_LAMBDA {
          float* place = columns + row * kGroup;
          TL_UNROLL
          for (const F32x16& product : tile) {
            store(place, join(product, load(place)));
            place += kGroup;
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
