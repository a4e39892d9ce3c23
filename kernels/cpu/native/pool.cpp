// See pool.h.
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>

#include "float_state.h"
#include "waiting.h"

namespace tokenline {
namespace {

constexpr uint64_t kDone = 1;
constexpr uint64_t kClaimed = uint64_t{1} << 32;

// A claimed chunk takes microseconds, unless its thread has lost its core.
constexpr double kSecondsOfChunk = 50e-6;
// How long a helper looks out for the next job before it sleeps: the other processes of a small
// machine need its core between steps.
constexpr double kSecondsBeforeSleep = 50e-6;

// For what another thread does that has lost its core. Perhaps it waits for this one; else this one
// falls idle, upon which the system looks for something to run here: a busy wait would leave that
// thread where it is. Steps a second of a synthetic program: beside five light processes 106 (106
// with sleeping alone, 96 with yielding alone), beside one that never pauses 73 (61, 68).
template <class Condition>
void wait_for_core(Condition is_over) {
  constexpr int kYields = 2;
  for (;;) {
    for (int i = 0; i < kYields; i++) {
      if (is_over()) return;
      std::this_thread::yield();
    }
    if (is_over()) return;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// Signals are for the threads that were there before: a helper would take them away from Python's
// main thread. Those that a fault of its own raises stay, so that crashes are told.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

Job::Job(std::shared_ptr<const void> owner, const Stage* const* stages, int num_stages)
    : owner_(std::move(owner)),
      stages_(stages),
      num_stages_(num_stages),
      progress_(new Progress[static_cast<size_t>(num_stages)]) {}

void Job::reset(const int64_t* counts, int num_counts, int num_threads) {
  num_shares_ = std::clamp(num_threads, 1, kMostShares);
  for (int i = 0; i < num_counts; i++) counts_[i] = counts[i];
  for (int i = 0; i < num_stages_; i++) {
    for (auto& share : progress_[i].claimed_and_done) share.store(0, std::memory_order_relaxed);
    progress_[i].num_chunks.store(kUnknown, std::memory_order_relaxed);
  }
  current_stage_.store(0, std::memory_order_relaxed);
  has_failed_.store(false, std::memory_order_relaxed);
}

void Job::lead(Scratch& scratch, double* seconds) noexcept {
  double before = seconds ? now() : 0;
  Lookahead lookahead = lookahead_of(0);
  for (int stage = 0; stage < num_stages_; stage++) {
    work(stage, 0, scratch, lookahead);
    current_stage_.store(stage + 1, std::memory_order_release);
    if (seconds) {
      const double after = now();
      seconds[stage] += after - before;
      before = after;
    }
  }
}

void Job::help(int thread, Scratch& scratch) noexcept {
  Lookahead lookahead = lookahead_of(thread);
  int stage = current_stage_.load(std::memory_order_acquire);
  while (stage < num_stages_) {
    work(stage, thread, scratch, lookahead);
    // The caller may be far ahead by now, or, where it has lost its core, behind.
    const int current = current_stage_.load(std::memory_order_acquire);
    stage = current > stage ? current : stage + 1;
  }
}

int64_t Job::count_chunks(int stage) {
  std::atomic<int64_t>& known = progress_[stage].num_chunks;
  int64_t count = known.load(std::memory_order_acquire);
  if (count == kUnknown) {
    const int64_t found = stages_[stage]->num_chunks(counts_);
    // Who comes first settles it: what a late thread found may be that of a later job.
    if (known.compare_exchange_strong(count, found, std::memory_order_acq_rel)) count = found;
  }
  return count;
}

void Job::work(int stage, int thread, Scratch& scratch, Lookahead& lookahead) {
  count_chunks(stage);
  for (int i = 0; i < num_shares_; i++) work_on_share(stage, (thread + i) % num_shares_, scratch);
  const auto over = [&] { return is_over(stage); };
  const auto over_or_fetch = [&] {
    if (over()) return true;
    lookahead.fetch_some(stage);
    return false;
  };
  if (!spin(kSecondsOfChunk, over_or_fetch)) wait_for_core(over);
}

void Job::work_on_share(int stage, int share, Scratch& scratch) {
  const int64_t num_chunks = count_chunks(stage);
  const auto first = static_cast<uint64_t>(first_chunk(share, num_shares_, num_chunks));
  const auto end = static_cast<uint64_t>(first_chunk(share + 1, num_shares_, num_chunks));
  const uint64_t size = end - first;
  std::atomic<uint64_t>& progress = progress_[stage].claimed_and_done[share];
  if (progress.load(std::memory_order_acquire) / kClaimed >= size) return;
  uint64_t before = progress.fetch_add(kClaimed, std::memory_order_acq_rel);
  while (before / kClaimed < size) {
    run_chunk(stage, first + before / kClaimed, scratch);
    before = progress.fetch_add(kClaimed + kDone, std::memory_order_acq_rel);
  }
}

bool Job::is_over(int stage) const {
  const Progress& progress = progress_[stage];
  uint64_t num_done = 0;
  for (int share = 0; share < num_shares_; share++) {
    num_done += progress.claimed_and_done[share].load(std::memory_order_acquire) % kClaimed;
  }
  return num_done >= static_cast<uint64_t>(progress.num_chunks.load(std::memory_order_relaxed));
}

// After a failure chunks are only counted off: what they would read may not be there.
void Job::run_chunk(int stage, uint64_t chunk, Scratch& scratch) noexcept {
  if (has_failed()) return;
  try {
    stages_[stage]->run(static_cast<int64_t>(chunk), counts_, scratch);
  } catch (const std::exception&) {
    has_failed_.store(true, std::memory_order_relaxed);
  }
}

Pool::Pool(int num_threads) : process_(getpid()) {
  if (num_threads > 1) start(num_threads - 1);
}

void Pool::start(int num_helpers) {
  const SignalsBlocked blocked;
  try {
    helpers_.reserve(static_cast<size_t>(num_helpers));
    for (int i = 0; i < num_helpers; i++) helpers_.emplace_back([this, i] { serve(i + 1); });
  } catch (const std::exception&) {
    // A limit on threads or memory: the work is done by those that there are.
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
    num_posted_.store(++num_jobs_, std::memory_order_release);
  }
  job_came_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

bool Pool::is_forked() const { return getpid() != process_; }

bool Pool::run(const std::shared_ptr<Job>& job, double* seconds) noexcept {
  const FloatState defaults;
  if (is_taken_.exchange(true, std::memory_order_acquire)) {
    Scratch scratch;
    job->lead(scratch, seconds);
    return !job->has_failed();
  }
  const bool is_shared = !helpers_.empty() && !job->is_for_one() && !is_forked();
  if (is_shared) post(job);
  job->lead(caller_scratch_, seconds);
  if (is_shared) {
    std::lock_guard<std::mutex> lock(mutex_);
    job_.reset();
  }
  const bool went_well = !job->has_failed();
  is_taken_.store(false, std::memory_order_release);
  return went_well;
}

void Pool::post(const std::shared_ptr<Job>& job) {
  uint32_t number;
  bool is_anyone_asleep;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = job;
    number = ++num_jobs_;
    is_anyone_asleep = num_asleep_ > 0;
  }
  // Told after the mutex is free: those who look out for it come for the mutex at once.
  num_posted_.store(number, std::memory_order_release);
  if (is_anyone_asleep) job_came_.notify_all();
}

void Pool::serve(int thread) {
  const FloatState defaults;
  Scratch scratch;
  uint32_t num_seen = 0;
  while (const std::shared_ptr<Job> job = next_job(&num_seen)) {
    job->help(thread, scratch);
    job->leave();
  }
}

std::shared_ptr<Job> Pool::next_job(uint32_t* num_seen) {
  for (;;) {
    spin(kSecondsBeforeSleep,
         [&] { return num_posted_.load(std::memory_order_acquire) != *num_seen; });
    std::unique_lock<std::mutex> lock(mutex_);
    num_asleep_++;
    job_came_.wait(lock, [&] { return num_jobs_ != *num_seen || stops_; });
    num_asleep_--;
    if (stops_) return nullptr;
    *num_seen = num_jobs_;
    // It may be over already, and gone.
    if (job_) {
      job_->enter();
      return job_;
    }
  }
}

}  // namespace tokenline
