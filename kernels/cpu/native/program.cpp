// See program.h; and the parts of the C interface that need no kernel.
#include "program.h"

#include <algorithm>

using tokenline::Job;
using tokenline::Pool;
using tokenline::Stage;

void TlProgram::add(std::unique_ptr<Stage> stage) {
  stages_->all.push_back(stage.get());
  stages_->owned.push_back(std::move(stage));
  op_of_stage_.push_back(num_ops() - 1);
  job_.reset();
}

void TlProgram::run(Pool& pool, const int64_t* counts) {
  // A helper that has not yet left the last run keeps that job; this run then gets its own.
  if (!job_ || job_->has_helpers()) {
    const auto& all = stages_->all;
    job_ = std::make_shared<Job>(stages_, all.data(), static_cast<int>(all.size()));
  }
  job_->reset(counts, TL_NUM_COUNTS);
  pool.run(job_, profiles_ ? stage_seconds_.data() : nullptr);
}

void TlProgram::set_profiling(bool is_on) {
  profiles_ = is_on;
  stage_seconds_.assign(op_of_stage_.size(), 0.0);
}

void TlProgram::profile(double* seconds) const {
  std::fill(seconds, seconds + num_ops(), 0.0);
  for (size_t i = 0; i < stage_seconds_.size(); i++) seconds[op_of_stage_[i]] += stage_seconds_[i];
}

struct TlPool : Pool {
  using Pool::Pool;
};

TlPool* tl_pool_new(int32_t num_threads) { return new TlPool(num_threads); }
void tl_pool_delete(TlPool* pool) { delete pool; }

TlProgram* tl_program_new(void) { return new TlProgram; }
void tl_program_delete(TlProgram* program) { delete program; }
void tl_program_run(TlProgram* program, TlPool* pool, const int64_t counts[TL_NUM_COUNTS]) {
  program->run(*pool, counts);
}
int32_t tl_program_num_ops(const TlProgram* program) { return program->num_ops(); }
const char* tl_program_op_name(const TlProgram* program, int32_t op) {
  return program->op_name(op);
}
void tl_program_set_profiling(TlProgram* program, int32_t is_on) {
  program->set_profiling(is_on != 0);
}
void tl_program_profile(const TlProgram* program, double* seconds) { program->profile(seconds); }

const char* tl_instruction_set(void) {
#if defined(TL_AVX512)
  return "avx512";
#elif defined(TL_AVX2)
  return "avx2";
#elif defined(TL_NEON)
  return "neon";
#else
  return "portable";
#endif
}

const char* tl_best_instruction_set(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni")) {
    return "avx512";
  }
  return has_avx2 ? "avx2" : "portable";
#elif defined(__aarch64__)
  return "neon";
#else
  return "portable";
#endif
}
