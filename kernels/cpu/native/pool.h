// The thread pool: a caller that does the work itself, and helpers that join in when they can.
//
// A job is a row of stages, each cut into chunks. Whoever is free claims the next chunk; a stage is
// over when all of its chunks are done. Nobody ever waits for a helper to arrive, only for chunks
// that one has claimed: so a helper whose core is taken by another process holds up one chunk at
// most, where a barrier would stall every stage of a step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tokenline {

// Memory of one thread for the length of a chunk; what it holds afterwards is void.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `count` values, aligned to 64 bytes. Takes back what the last call gave.
  template <class T>
  T* get(size_t count) {
    return static_cast<T*>(bytes(count * sizeof(T)));
  }

 private:
  void* bytes(size_t size);

  void* memory_ = nullptr;
  size_t size_ = 0;
};

// One stage of a job. Both functions run on several threads at once.
class Stage {
 public:
  virtual ~Stage() = default;

  // The number of chunks, given the job's counts. Called when all earlier stages are over, but by a
  // thread that comes late also while the same stage belongs to a later job, for no use: so it may
  // read constants, counts and atomics only.
  virtual int64_t num_chunks(const int64_t* counts) const = 0;

  // Chunks of a stage write to different places and do not read what others of it write.
  virtual void run(int64_t chunk, const int64_t* counts, Scratch& scratch) const = 0;
};

// Stages to run once. Shared by its caller and the helpers that have joined.
class Job {
 public:
  static constexpr int kMaxCounts = 8;

  // `owner` keeps the stages alive as long as the job.
  Job(std::shared_ptr<const void> owner, const Stage* const* stages, int num_stages);

  // Makes it ready to run again; no helper may be inside.
  void reset(const int64_t* counts, int num_counts);

  // A helper that joined and has not left yet holds the job up from being used again.
  void enter() { num_helpers_.fetch_add(1, std::memory_order_relaxed); }
  void leave() { num_helpers_.fetch_sub(1, std::memory_order_release); }
  bool has_helpers() const { return num_helpers_.load(std::memory_order_acquire) > 0; }

  int num_stages() const { return num_stages_; }
  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  void set_over() { is_over_.store(true, std::memory_order_release); }

  // Works on a stage as long as it has chunks, then waits for the claimed ones.
  void work(int stage, Scratch& scratch);

 private:
  struct alignas(64) Progress {
    std::atomic<int64_t> num_chunks{-1};
    std::atomic<int64_t> num_claimed{0};
    alignas(64) std::atomic<int64_t> num_done{0};
  };

  int64_t count_chunks(int stage);

  std::shared_ptr<const void> owner_;
  const Stage* const* stages_;
  int num_stages_;
  int64_t counts_[kMaxCounts] = {};
  std::atomic<bool> is_over_{false};
  std::atomic<int> num_helpers_{0};
  std::unique_ptr<Progress[]> progress_;
};

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // Runs all stages, one after the other; returns when the last is over. One caller at a time. With
  // `seconds` [num_stages], adds to each what its stage took.
  void run(const std::shared_ptr<Job>& job, double* seconds = nullptr);

  // Runs `chunk(index, scratch)` for each index, on stages made for this one call.
  template <class Chunk>
  void for_each(int64_t num_chunks, Chunk chunk);

 private:
  void help();
  std::shared_ptr<Job> next_job(uint32_t* seen);

  std::mutex mutex_;
  std::condition_variable job_came_;
  std::shared_ptr<Job> job_;  // under mutex_
  int num_asleep_ = 0;        // under mutex_
  bool stops_ = false;        // under mutex_
  std::atomic<uint32_t> num_jobs_{0};
  Scratch caller_scratch_;
  std::vector<std::thread> helpers_;
};

template <class Chunk>
void Pool::for_each(int64_t num_chunks, Chunk chunk) {
  struct One : Stage {
    One(int64_t n, Chunk f) : num_chunks_(n), chunk_(std::move(f)) { self = this; }
    int64_t num_chunks(const int64_t*) const override { return num_chunks_; }
    void run(int64_t index, const int64_t*, Scratch& scratch) const override {
      chunk_(index, scratch);
    }
    int64_t num_chunks_;
    Chunk chunk_;
    const Stage* self;
  };
  auto stage = std::make_shared<One>(num_chunks, std::move(chunk));
  const Stage* const* stages = &stage->self;
  auto job = std::make_shared<Job>(std::move(stage), stages, 1);
  run(job);
}

}  // namespace tokenline
