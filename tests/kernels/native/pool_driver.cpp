// Works a thread pool hard, in every way that it may be used; meant to run under ThreadSanitizer.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "pool.h"
#include "program.h"

using tokenline::Pool;
using tokenline::Scratch;
using tokenline::Span;
using tokenline::Stage;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

// Stage i adds the sum of what stage i - 1 wrote to each of its own values: wrong at once where a
// stage begins before the one before it is over.
struct Chain {
  explicit Chain(int num_stages, int64_t most) : values(static_cast<size_t>(num_stages)) {
    for (auto& stage : values) stage.resize(static_cast<size_t>(most));
  }
  std::vector<std::vector<int64_t>> values;
};

class ChainStage : public Stage {
 public:
  ChainStage(Chain* chain, size_t index) : chain_(chain), index_(index) {}

  // Stages have more and fewer chunks in turn; some have none.
  int64_t num_chunks(const int64_t* counts) const override {
    return counts[index_ % TL_NUM_COUNTS];
  }

  void run(int64_t chunk, const int64_t* counts, Scratch& scratch) const override {
    int64_t sum = 1;
    if (index_ > 0) {
      const auto& before = chain_->values[index_ - 1];
      const int64_t count = counts[(index_ - 1) % TL_NUM_COUNTS];
      // Through the scratch, which nobody else may have.
      int64_t* copy = scratch.get<int64_t>(static_cast<size_t>(count + 1));
      for (int64_t i = 0; i < count; i++) copy[i] = before[static_cast<size_t>(i)];
      for (int64_t i = 0; i < count; i++) sum += copy[i] % 1000;
    }
    chain_->values[index_][static_cast<size_t>(chunk)] = sum;
  }

  // Every third stage has weights, in two pieces; only those of its own chunks may be fetched.
  Span weights(int64_t chunk, int piece, const int64_t* counts) const override {
    static const uint8_t memory[2][3 * 64] = {};
    if (index_ % 3 != 1 || piece == 2) return {};
    check(chunk >= 0 && chunk < std::max<int64_t>(num_chunks(counts), 1), "a chunk that there is");
    check(piece >= 0 && piece < 2, "pieces up to the empty one");
    return {memory[piece], 3 * 64};
  }

 private:
  Chain* chain_;
  size_t index_;
};

constexpr int64_t kMostChunks = 24;

class ChainProgram {
 public:
  explicit ChainProgram(int num_stages) : num_stages_(num_stages) {
    // The program keeps the values, as the caller's buffers would be kept.
    chain_ = program_->keep(std::make_shared<Chain>(num_stages, kMostChunks));
    program_->begin_op("chain");
    for (int i = 0; i < num_stages; i++) {
      program_->add(std::make_unique<ChainStage>(chain_, static_cast<size_t>(i)));
    }
  }

  void run(Pool& pool, const std::vector<int64_t>& counts) {
    program_->run(pool, counts.data());
    std::vector<int64_t> before;
    for (int i = 0; i < num_stages_; i++) {
      int64_t sum = 1;
      for (int64_t value : before) sum += value % 1000;
      before.assign(static_cast<size_t>(counts[static_cast<size_t>(i % TL_NUM_COUNTS)]), sum);
      const auto& stage = chain_->values[static_cast<size_t>(i)];
      for (size_t j = 0; j < before.size(); j++) check(stage[j] == before[j], "a stage's values");
    }
  }

  TlProgram& program() { return *program_; }

 private:
  int num_stages_;
  std::unique_ptr<TlProgram> program_ = std::make_unique<TlProgram>();
  Chain* chain_;
};

std::vector<int64_t> random_counts(std::mt19937& random) {
  std::vector<int64_t> counts(TL_NUM_COUNTS);
  for (int64_t& count : counts) count = static_cast<int64_t>(random() % (kMostChunks + 1));
  return counts;
}

void stages_run_one_after_the_other(int num_threads, int rounds) {
  std::mt19937 random(1);
  Pool pool(num_threads);
  ChainProgram small(3), large(150);
  for (int i = 0; i < rounds; i++) {
    small.run(pool, random_counts(random));
    large.run(pool, random_counts(random));
  }
}

// Helpers arrive while the program goes away, and with them what it kept.
void programs_may_go_at_once(int num_threads, int rounds) {
  std::mt19937 random(2);
  Pool pool(num_threads);
  for (int i = 0; i < rounds; i++) ChainProgram(1 + i % 7).run(pool, random_counts(random));
}

void pools_may_go_at_once(int rounds) {
  std::mt19937 random(3);
  for (int i = 0; i < rounds; i++) {
    Pool pool(1 + i % 6);
    if (i % 3) ChainProgram(5).run(pool, random_counts(random));
  }
}

void callers_may_come_at_once(int num_threads, int rounds) {
  Pool pool(num_threads);
  std::vector<std::thread> callers;
  for (unsigned seed = 0; seed < 3; seed++) {
    callers.emplace_back([&pool, seed, rounds] {
      std::mt19937 random(seed);
      ChainProgram program(20);
      for (int i = 0; i < rounds; i++) program.run(pool, random_counts(random));
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void chunks_may_run_jobs_themselves(int num_threads) {
  Pool pool(num_threads);
  std::vector<int64_t> values(400);
  pool.for_each(20, [&](int64_t outer, Scratch&) {
    pool.for_each(20, [&, outer](int64_t inner, Scratch&) {
      values[static_cast<size_t>(outer * 20 + inner)] = outer * inner;
    });
  });
  for (size_t i = 0; i < values.size(); i++) {
    check(values[i] == static_cast<int64_t>(i / 20 * (i % 20)), "a value of an inner job");
  }
}

// The helpers are gone there, perhaps with the mutex in hand.
void a_child_of_a_fork_works_alone(int num_threads, int rounds) {
  std::mt19937 random(4);
  auto pool = std::make_unique<Pool>(num_threads);
  ChainProgram program(20);
  for (int i = 0; i < rounds; i++) {
    program.run(*pool, random_counts(random));
    const pid_t child = fork();
    if (child == 0) {
      program.run(*pool, random_counts(random));
      check(pool->is_forked(), "the child knows that it is one");
      pool.release();
      _exit(0);
    }
    int status = -1;
    check(waitpid(child, &status, 0) == child && status == 0, "the child ends well");
  }
}

void profiles_count_each_op() {
  Pool pool(2);
  ChainProgram chain(10);
  TlProgram& program = chain.program();
  program.set_profiling(true);
  program.begin_op("nothing");
  for (int i = 0; i < 100; i++) chain.run(pool, {8, 8, 8, 8});
  double seconds[2];
  program.profile(seconds);
  check(seconds[0] > 0 && seconds[1] == 0, "the profile");
  program.set_profiling(true);
  program.profile(seconds);
  check(seconds[0] == 0, "the profile begins anew");
}

// A denormal times one stays what it is, in the caller and in helpers, whatever the caller's
// thread does to denormals; and the caller gets its way of rounding back.
void floats_behave_the_same_on_all_threads(int num_threads) {
#if defined(__x86_64__)
  constexpr unsigned kFlushAll = 0x9fc0;
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(kFlushAll);
  {
    Pool pool(num_threads);
    volatile float denormal = 1e-40f;
    std::vector<float> values(1000);
    pool.for_each(1000, [&](int64_t i, Scratch&) {
      values[static_cast<size_t>(i)] = denormal * 1.0f;
    });
    check((__builtin_ia32_stmxcsr() & 0xffc0) == kFlushAll, "the caller's own way is back");
    __builtin_ia32_ldmxcsr(before);
    for (float value : values) check(value == 1e-40f, "a denormal");
  }
#else
  (void)num_threads;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  for (int num_threads : {1, 2, 3, 8}) {
    stages_run_one_after_the_other(num_threads, rounds);
    programs_may_go_at_once(num_threads, rounds * 10);
    callers_may_come_at_once(num_threads, rounds);
    chunks_may_run_jobs_themselves(num_threads);
    a_child_of_a_fork_works_alone(num_threads, rounds / 10);
    floats_behave_the_same_on_all_threads(num_threads);
  }
  pools_may_go_at_once(rounds);
  profiles_count_each_op();
  std::puts("all hold");
}
