// What a thread fetches while it waits for others: the weights that it will read next.
//
// One sequence's step waits for memory in its products, while the memory waits for the stages between
// them, of which one thread or two do little each. Found with 2 threads on an Intel Xeon, SmolLM2-135M,
// one sequence: 3 to 4 % more tokens a second; 16 sequences: 1 %.
#pragma once

#include "stage.h"

namespace tokenline {

// The first chunk of a share, given those of all; the shares are as even as can be.
inline int64_t first_chunk(int share, int num_shares, int64_t num_chunks) {
  return num_chunks * share / num_shares;
}

// Of one thread for one run of a job, whose stages and counts outlive it.
class Lookahead {
 public:
  // A thread that begins with no share of its own has nothing to fetch.
  Lookahead(const Stage* const* stages, int num_stages, const int64_t* counts, int thread,
            int num_shares);

  // Fetches a few lines more of what the thread reads first in the next stage after `stage` that has
  // weights.
  void fetch_some(int stage) noexcept;

 private:
  void find_next(int stage) noexcept;
  // Whether there is more to fetch, which then is `left_`.
  bool find_more() noexcept;

  const Stage* const* stages_;
  int num_stages_;
  const int64_t* counts_;
  int share_;
  int num_shares_;
  // The stage whose weights are fetched, and which of them are still to be.
  int next_ = -1;
  int64_t chunk_ = 0, end_chunk_ = 0;
  int piece_ = 0;
  Span left_;
  int64_t bytes_left_ = 0;
};

}  // namespace tokenline
