// See pool.h.
#include "pool.h"

#include <chrono>
#include <cstdlib>
#include <new>

namespace tokenline {
namespace {

// A claimed chunk takes microseconds, unless its thread has lost its core.
constexpr int kSpinsBeforeYield = 2000;
// How long a helper looks out for the next job before it sleeps, about 50 µs: the other processes
// of a small machine need its core between steps.
constexpr int kSpinsBeforeSleep = 1000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::bytes(size_t size) {
  if (size > size_) {
    std::free(memory_);
    size_ = (size + 4095) & ~size_t{4095};
    memory_ = std::aligned_alloc(64, size_);
    if (!memory_) std::abort();  // nothing sensible can follow in the middle of a step
  }
  return memory_;
}

Job::Job(std::shared_ptr<const void> owner, const Stage* const* stages, int num_stages)
    : owner_(std::move(owner)),
      stages_(stages),
      num_stages_(num_stages),
      progress_(new Progress[num_stages]) {}

void Job::reset(const int64_t* counts, int num_counts) {
  for (int i = 0; i < num_counts; i++) counts_[i] = counts[i];
  is_over_.store(false, std::memory_order_relaxed);
  for (int i = 0; i < num_stages_; i++) {
    progress_[i].num_chunks.store(-1, std::memory_order_relaxed);
    progress_[i].num_claimed.store(0, std::memory_order_relaxed);
    progress_[i].num_done.store(0, std::memory_order_relaxed);
  }
}

int64_t Job::count_chunks(int stage) {
  std::atomic<int64_t>& known = progress_[stage].num_chunks;
  int64_t count = known.load(std::memory_order_acquire);
  if (count < 0) {
    const int64_t found = stages_[stage]->num_chunks(counts_);
    // Who comes first settles it; another's count may be of a later job.
    if (known.compare_exchange_strong(count, found, std::memory_order_acq_rel)) count = found;
  }
  return count;
}

void Job::work(int stage, Scratch& scratch) {
  Progress& progress = progress_[stage];
  const int64_t num_chunks = count_chunks(stage);
  for (;;) {
    if (progress.num_claimed.load(std::memory_order_relaxed) >= num_chunks) break;
    const int64_t chunk = progress.num_claimed.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= num_chunks) break;
    stages_[stage]->run(chunk, counts_, scratch);
    progress.num_done.fetch_add(1, std::memory_order_acq_rel);
  }
  for (int spins = 0; progress.num_done.load(std::memory_order_acquire) < num_chunks; spins++) {
    if (spins < kSpinsBeforeYield) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

Pool::Pool(int num_threads) {
  for (int i = 1; i < num_threads; i++) helpers_.emplace_back([this] { help(); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
    num_jobs_.fetch_add(1, std::memory_order_release);
  }
  job_came_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Pool::run(const std::shared_ptr<Job>& job, double* seconds) {
  if (!helpers_.empty()) {
    bool anyone_asleep;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      num_jobs_.fetch_add(1, std::memory_order_release);
      anyone_asleep = num_asleep_ > 0;
    }
    if (anyone_asleep) job_came_.notify_all();
  }
  double before = seconds ? now() : 0;
  for (int stage = 0; stage < job->num_stages(); stage++) {
    job->work(stage, caller_scratch_);
    if (seconds) {
      const double after = now();
      seconds[stage] += after - before;
      before = after;
    }
  }
  job->set_over();
  if (!helpers_.empty()) {
    std::lock_guard<std::mutex> lock(mutex_);
    job_.reset();
  }
}

void Pool::help() {
  Scratch scratch;
  uint32_t seen = 0;
  for (;;) {
    std::shared_ptr<Job> job = next_job(&seen);
    if (!job) return;
    for (int stage = 0; stage < job->num_stages() && !job->is_over(); stage++) {
      job->work(stage, scratch);
    }
    job->leave();
  }
}

std::shared_ptr<Job> Pool::next_job(uint32_t* seen) {
  for (;;) {
    for (int spins = 0; spins < kSpinsBeforeSleep; spins++) {
      if (num_jobs_.load(std::memory_order_acquire) != *seen) break;
      pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    num_asleep_++;
    job_came_.wait(lock,
                   [&] { return num_jobs_.load(std::memory_order_relaxed) != *seen || stops_; });
    num_asleep_--;
    if (stops_) return nullptr;
    *seen = num_jobs_.load(std::memory_order_relaxed);
    // It may be over already, and gone.
    if (job_) {
      job_->enter();
      return job_;
    }
  }
}

}  // namespace tokenline
