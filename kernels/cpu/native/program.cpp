// See program.h; and the C interface of pools and programs.
#include "program.h"

#include <algorithm>
#include <exception>
#include <new>

using tokenline::Job;
using tokenline::Pool;
using tokenline::Stage;

void TlProgram::add(std::unique_ptr<Stage> stage) {
  stages_->all.push_back(stage.get());
  stages_->owned.push_back(std::move(stage));
  op_of_stage_.push_back(names_.size() - 1);
  stage_seconds_.push_back(0.0);
  job_.reset();
}

bool TlProgram::run(Pool& pool, const int64_t* counts) {
  // A helper that has not yet left the last run keeps that job; this run then gets its own.
  if (!job_ || job_->has_helpers()) {
    const auto& all = stages_->all;
    job_ = std::make_shared<Job>(stages_, all.data(), static_cast<int>(all.size()));
  }
  job_->reset(counts, TL_NUM_COUNTS, pool.num_threads());
  return pool.run(job_, profiles_ ? stage_seconds_.data() : nullptr);
}

void TlProgram::set_profiling(bool is_on) {
  profiles_ = is_on;
  std::fill(stage_seconds_.begin(), stage_seconds_.end(), 0.0);
}

void TlProgram::profile(double* seconds) const {
  std::fill(seconds, seconds + num_ops(), 0.0);
  for (size_t i = 0; i < stage_seconds_.size(); i++) seconds[op_of_stage_[i]] += stage_seconds_[i];
}

TlPool* tl_pool_new(int32_t num_threads) {
  try {
    return new TlPool(num_threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void tl_pool_delete(TlPool* pool) {
  // In a fork's child there is nobody to end, and what its threads held is held for ever.
  if (pool && !pool->is_forked()) delete pool;
}

int32_t tl_pool_num_threads(const TlPool* pool) { return pool->num_threads(); }

TlProgram* tl_program_new(void) {
  try {
    return new TlProgram;
  } catch (const std::exception&) {
    return nullptr;
  }
}

void tl_program_delete(TlProgram* program) { delete program; }

int32_t tl_program_run(TlProgram* program, TlPool* pool, const int64_t counts[TL_NUM_COUNTS]) {
  return tokenline::guarded([&] {
    if (!program->run(*pool, counts)) throw std::bad_alloc();
  });
}

int32_t tl_program_num_ops(const TlProgram* program) { return program->num_ops(); }

const char* tl_program_op_name(const TlProgram* program, int32_t op) {
  return program->op_name(op);
}

void tl_program_set_profiling(TlProgram* program, int32_t is_on) {
  program->set_profiling(is_on != 0);
}

void tl_program_profile(const TlProgram* program, double* seconds) { program->profile(seconds); }
