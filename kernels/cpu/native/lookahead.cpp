// See lookahead.h.
#include "lookahead.h"

#include <algorithm>

namespace tokenline {
namespace {

constexpr int64_t kLineBytes = 64;
// Between two looks whether the wait is over; about a quarter of a microsecond of a core's bandwidth.
constexpr int kLinesAtOnce = 64;
// Of one stage: what is fetched must still be in the second-level cache when it is read.
constexpr int64_t kMostBytes = 128 << 10;

}  // namespace

Lookahead::Lookahead(const Stage* const* stages, int num_stages, const int64_t* counts, int thread,
                     int num_shares)
    : stages_(stages),
      num_stages_(num_stages),
      counts_(counts),
      share_(thread),
      num_shares_(num_shares) {
  if (share_ >= num_shares_) next_ = num_stages_;
}

void Lookahead::fetch_some(int stage) noexcept {
  if (next_ <= stage) find_next(stage);
  for (int line = 0; line < kLinesAtOnce; line++) {
    if (left_.bytes <= 0 && !find_more()) return;
    __builtin_prefetch(left_.first, 0, 2);
    left_.first += kLineBytes;
    left_.bytes -= kLineBytes;
  }
}

void Lookahead::find_next(int stage) noexcept {
  next_ = stage + 1;
  while (next_ < num_stages_ && stages_[next_]->weights(0, 0, counts_).bytes == 0) next_++;
  left_ = {};
  chunk_ = end_chunk_ = 0;
  piece_ = 0;
  bytes_left_ = kMostBytes;
  if (next_ == num_stages_) return;
  const int64_t num_chunks = stages_[next_]->num_chunks(counts_);
  chunk_ = first_chunk(share_, num_shares_, num_chunks);
  end_chunk_ = first_chunk(share_ + 1, num_shares_, num_chunks);
}

bool Lookahead::find_more() noexcept {
  while (chunk_ < end_chunk_ && bytes_left_ > 0) {
    left_ = stages_[next_]->weights(chunk_, piece_++, counts_);
    if (left_.bytes > 0) {
      left_.bytes = std::min(left_.bytes, bytes_left_);
      bytes_left_ -= left_.bytes;
      return true;
    }
    chunk_++;
    piece_ = 0;
  }
  return false;
}

}  // namespace tokenline
