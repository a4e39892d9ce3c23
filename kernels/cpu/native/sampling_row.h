// One row of logits, read in blocks of 64 tokens: what it is scanned for, and what lies above a
// threshold.
#pragma once

#include <cfloat>
#include <cstdint>

#include "sampling_lanes.h"

namespace tokenline {

constexpr int64_t kBlock = 64;

TL_INLINE int64_t num_blocks(int64_t vocab_size) { return (vocab_size + kBlock - 1) / kBlock; }

class LogitRow {
 public:
  // `block_maxima` has room for num_blocks(vocab_size).
  LogitRow(const float* logits, int64_t vocab_size, float* block_maxima)
      : logits_(logits), vocab_size_(vocab_size), block_maxima_(block_maxima) {}

  // Reads it once, before all else. False where the largest logit is not finite, or any is NaN:
  // such a row has none of what follows.
  bool scan();

  float largest() const { return largest_; }
  // The first of the largest.
  int64_t likeliest() const { return likeliest_; }
  // exp((logit - largest) · inverse_temperature) of all, added up in one fixed order; and each of
  // them in `out`, if there is one, with room for num_blocks() · 64.
  double exponentials(float inverse_temperature, float* out = nullptr) const;
  // At least k logits are no less, seldom many more; -inf where there is no saying. `buffer` has
  // room for num_blocks(vocab_size).
  float bound_of_kth(int64_t k, float* buffer) const;

  float operator[](int64_t id) const { return logits_[id]; }
  int64_t vocab_size() const { return vocab_size_; }
  int64_t num_blocks() const { return tokenline::num_blocks(vocab_size_); }
  float block_maximum(int64_t block) const { return block_maxima_[block]; }

  // The 64 logits of a block; those beyond the last token are -inf, in `padded`.
  TL_INLINE const float* block(int64_t index, float padded[kBlock]) const {
    const float* values = logits_ + index * kBlock;
    const int64_t count = vocab_size_ - index * kBlock;
    if (count >= kBlock) return values;
    for (int64_t i = 0; i < kBlock; i++) padded[i] = i < count ? values[i] : -INFINITY;
    return padded;
  }

  // Calls visit(id, logit) for each logit in [least, end), in the order of the ids.
  template <class Visit>
  TL_INLINE void visit_between(float least, float end, Visit visit) const {
    float padded[kBlock];
    for (int64_t b = 0; b < num_blocks(); b++) {
      if (!(block_maxima_[b] >= least)) continue;
      const float* values = block(b, padded);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const F32x16 logits = load(values + i);
        uint32_t bits = bits_not_less(logits, broadcast(least)) &
                        bits_greater(broadcast(end), logits);
        for (; bits; bits &= bits - 1) {
          const int64_t place = i + __builtin_ctz(bits);
          if (b * kBlock + place < vocab_size_) visit(b * kBlock + place, values[place]);
        }
      }
    }
  }

 private:
  const float* logits_;
  int64_t vocab_size_;
  float* block_maxima_;
  float largest_ = -INFINITY;
  int64_t likeliest_ = 0;
};

}  // namespace tokenline
