// See sampling_draw.h.
#include "sampling_draw.h"

#include <algorithm>
#include <cmath>

#include "sampling_noise.h"

namespace tokenline {
namespace {

// The best token so far. Scores are compared in double precision: they hardly ever tie there.
class Winner {
 public:
  Winner(const LogitRow& row, float temperature, const Philox& philox)
      : row_(row), temperature_(static_cast<double>(temperature)), philox_(philox) {
    consider(row.likeliest(), philox.bits(row.likeliest()));
  }

  void consider(int64_t id, uint32_t bits) {
    const double scaled = static_cast<double>(row_[id]) / temperature_;
    const double score = scaled + static_cast<double>(gumbel(bits));
    if (id_ < 0 || score > score_ || (score == score_ && id < id_)) {
      id_ = id;
      score_ = score;
      // Bounds are taken in single precision: they may be so far off, of a score as large.
      const double slack = 1e-4 + 1e-6 * (std::fabs(score) + 25.0);
      bar_ = static_cast<float>(std::clamp<double>(score - slack, -FLT_MAX, FLT_MAX));
    }
  }

  int64_t id() const { return id_; }
  // A token whose bound is no higher cannot win.
  float bar() const { return bar_; }

 private:
  const LogitRow& row_;
  double temperature_;
  const Philox& philox_;
  int64_t id_ = -1;
  double score_ = 0;
  float bar_ = 0;
};

}  // namespace

int64_t draw(const LogitRow& row, const Cut& cut, float temperature, const Philox& philox) {
  // The likeliest token first. Most others cannot come near: of a block that might, the noise bits
  // are made, and only of a token whose bits are high enough the noise itself.
  Winner winner(row, temperature, philox);
  const float inverse = 1.0f / temperature;
  float padded[kBlock];
  for (int64_t b = 0; b < row.num_blocks(); b++) {
    const float most = row.block_maximum(b);
    if (most < cut.value || most * inverse + kMostNoise <= winner.bar()) continue;
    const float* values = row.block(b, padded);
    for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
      I32x16 bits[2];
      philox.bits_of_32(b * kBlock + i, &bits[0], &bits[1]);
      for (int half = 0; half < 2; half++) {
        const int64_t first = i + half * kLanes;
        const F32x16 logits = load(values + first);
        const F32x16 bound = logits * broadcast(inverse) + noise_bound(bits[half]);
        uint32_t hopeful = bits_greater(bound, broadcast(winner.bar())) &
                           bits_not_less(logits, broadcast(cut.value));
        if (!hopeful) continue;
        int32_t words[kLanes];
        store_int(words, bits[half]);
        for (; hopeful; hopeful &= hopeful - 1) {
          const int lane = __builtin_ctz(hopeful);
          const int64_t id = b * kBlock + first + lane;
          if (cut.keeps(values[first + lane], id)) {
            winner.consider(id, static_cast<uint32_t>(words[lane]));
          }
        }
      }
    }
  }
  return winner.id();
}

}  // namespace tokenline
