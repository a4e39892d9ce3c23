// A recorded list of ops, each of one stage or several, that runs in one call.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api.h"
#include "pool.h"

// Named in the C interface, so outside the namespace.
struct TlPool : tokenline::Pool {
  using tokenline::Pool::Pool;
};

struct TlProgram {
  // Ops are added first, then the program runs as often as one likes. Begins an op; the stages
  // added next are its own. Adding and keeping throw std::bad_alloc, upon which the program is good
  // for nothing.
  void begin_op(const char* name) { names_.push_back(name); }
  void add(std::unique_ptr<tokenline::Stage> stage);
  // Keeps `thing` alive as long as the program.
  template <class T>
  T* keep(std::shared_ptr<T> thing) {
    T* kept = thing.get();
    stages_->kept.push_back(std::move(thing));
    return kept;
  }

  // False where memory ran out.
  bool run(tokenline::Pool& pool, const int64_t* counts);

  int num_ops() const { return static_cast<int>(names_.size()); }
  const char* op_name(int op) const { return names_[static_cast<size_t>(op)].c_str(); }
  void set_profiling(bool is_on);
  void profile(double* seconds) const;

 private:
  // Shared with the jobs, in which a late helper may still look after the program is gone.
  struct Stages {
    std::vector<std::unique_ptr<tokenline::Stage>> owned;
    std::vector<const tokenline::Stage*> all;
    std::vector<std::shared_ptr<void>> kept;
  };

  std::shared_ptr<Stages> stages_ = std::make_shared<Stages>();
  std::vector<std::string> names_;
  std::vector<size_t> op_of_stage_;
  std::shared_ptr<tokenline::Job> job_;
  bool profiles_ = false;
  std::vector<double> stage_seconds_;
};

namespace tokenline {

// What a function of the C interface does: TL_OK, or TL_NO_MEMORY where `body` throws, for want of
// memory or since it wants more than there can be.
template <class Body>
int32_t guarded(const Body& body) noexcept {
  try {
    body();
    return TL_OK;
  } catch (const std::exception&) {
    return TL_NO_MEMORY;
  }
}

}  // namespace tokenline
