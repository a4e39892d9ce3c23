// The thread pool: a caller that does the work itself, and helpers that join in when they can.
//
// A job is a row of stages, each cut into chunks. Whoever is free claims the next chunk; a stage is
// over when all of its chunks are done. Nobody ever waits for a helper to arrive, only for chunks
// that one has claimed: so a helper whose core is taken by another process holds up one chunk at
// most, where a barrier would stall every stage of a step.
//
// The chunks of a stage lie in as many shares as there are threads, up to four. A thread begins with
// a share of its own, and goes on to the others': so what it reads is mostly in one piece, and what
// its core fetches ahead is for itself. With one row of chunks for all, each thread fetched the
// beginning of what the other one read: two took a fifth longer for a step of one row or of 16. And so
// a thread that waits for the end of a stage knows what to fetch for the next (lookahead.h).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "lookahead.h"
#include "stage.h"

namespace tokenline {

// Stages to run once. Shared by its caller and the helpers that have joined.
class Job {
 public:
  static constexpr int kMaxCounts = 8;

  // `owner` keeps the stages alive as long as the job.
  Job(std::shared_ptr<const void> owner, const Stage* const* stages, int num_stages);

  // Makes it ready to run again on so many threads; no helper may be inside.
  void reset(const int64_t* counts, int num_counts, int num_threads);

  // Nothing in it can be shared: not worth waking anybody for.
  bool is_for_one() { return num_stages_ == 0 || (num_stages_ == 1 && count_chunks(0) <= 1); }

  // Runs all stages, one after the other. With `seconds` [num_stages], adds to each what it took.
  void lead(Scratch& scratch, double* seconds) noexcept;

  // Works along from the stage that the caller is at, as long as there is something to do. `thread`
  // is the helper's number, from 1 on.
  void help(int thread, Scratch& scratch) noexcept;

  // A helper that joined and has not left yet holds the job up from being used again.
  void enter() { num_helpers_.fetch_add(1, std::memory_order_relaxed); }
  void leave() { num_helpers_.fetch_sub(1, std::memory_order_release); }
  bool has_helpers() const { return num_helpers_.load(std::memory_order_acquire) > 0; }

  // Whether a stage threw. Known when `lead` is over.
  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }

 private:
  static constexpr int kMostShares = 4;
  static constexpr int64_t kUnknown = -1;

  // One cache line per stage: the cores pass it to each other with every chunk.
  struct alignas(64) Progress {
    std::atomic<int64_t> num_chunks{kUnknown};
    // Of each share, the chunks that are claimed in the upper half, that are done in the lower: a
    // thread that has done one and claims the next says both at once.
    std::atomic<uint64_t> claimed_and_done[kMostShares] = {};
  };

  int64_t count_chunks(int stage);
  // Works on a stage as long as it has chunks, then waits for the claimed ones.
  void work(int stage, int thread, Scratch& scratch, Lookahead& lookahead);
  // Works on what is left of a share.
  void work_on_share(int stage, int share, Scratch& scratch);
  bool is_over(int stage) const;
  Lookahead lookahead_of(int thread) const {
    return {stages_, num_stages_, counts_, thread, num_shares_};
  }
  void run_chunk(int stage, uint64_t chunk, Scratch& scratch) noexcept;

  std::shared_ptr<const void> owner_;
  const Stage* const* stages_;
  int num_stages_;
  int num_shares_ = 1;
  int64_t counts_[kMaxCounts] = {};
  std::unique_ptr<Progress[]> progress_;
  // The first stage that may have work left; num_stages_ when the job is over.
  std::atomic<int> current_stage_{0};
  std::atomic<int> num_helpers_{0};
  std::atomic<bool> has_failed_{false};
};

class Pool {
 public:
  // The caller counts as one thread. Where the system refuses more threads, there are fewer.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs all stages, one after the other; returns when the last is over, or false where one failed.
  // The helpers serve one caller at a time: who comes while they do, be it a stage that runs a job
  // itself, and who comes in a child of a fork, where they are gone, works alone.
  bool run(const std::shared_ptr<Job>& job, double* seconds = nullptr) noexcept;

  // Runs `chunk(index, scratch)` for each index. Throws std::bad_alloc where a chunk did, or where
  // there is no memory for the job.
  template <class Chunk>
  void for_each(int64_t num_chunks, Chunk chunk);

  int num_threads() const { return static_cast<int>(helpers_.size()) + 1; }
  // Whether this process is a child of the pool's, without its threads: it may use the pool, but
  // not delete it.
  bool is_forked() const;

 private:
  void start(int num_helpers);
  void serve(int thread);
  std::shared_ptr<Job> next_job(uint32_t* num_seen);
  void post(const std::shared_ptr<Job>& job);

  std::mutex mutex_;
  std::condition_variable job_came_;
  std::shared_ptr<Job> job_;  // under mutex_; the next three too
  uint32_t num_jobs_ = 0;
  int num_asleep_ = 0;
  bool stops_ = false;
  std::atomic<uint32_t> num_posted_{0};  // num_jobs_, for those who look out without the mutex
  std::atomic<bool> is_taken_{false};
  Scratch caller_scratch_;
  pid_t process_;
  std::vector<std::thread> helpers_;
};

template <class Chunk>
void Pool::for_each(int64_t num_chunks, Chunk chunk) {
  struct Only : Stage {
    Only(int64_t n, Chunk f) : num_chunks_(n), chunk_(std::move(f)), self_(this) {}
    int64_t num_chunks(const int64_t*) const override { return num_chunks_; }
    void run(int64_t index, const int64_t*, Scratch& scratch) const override {
      chunk_(index, scratch);
    }
    int64_t num_chunks_;
    Chunk chunk_;
    const Stage* self_;
  };
  auto stage = std::make_shared<Only>(num_chunks, std::move(chunk));
  const Stage* const* stages = &stage->self_;
  if (!run(std::make_shared<Job>(std::move(stage), stages, 1))) throw std::bad_alloc();
}

}  // namespace tokenline
