// A part of a job: work cut into chunks that any thread may do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenline {

// Memory of one thread for the length of a chunk; what it holds afterwards is void.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `count` values, aligned to 64 bytes. Takes back what the last call gave. Throws
  // std::bad_alloc.
  template <class T>
  T* get(size_t count) {
    return static_cast<T*>(bytes(count * sizeof(T)));
  }

 private:
  void* bytes(size_t size);

  void* memory_ = nullptr;
  size_t size_ = 0;
};

struct Span {
  const uint8_t* first = nullptr;
  int64_t bytes = 0;
};

// Its functions run on several threads at once. `run` may throw: the job has then failed, and no more
// of it is run. The others may not.
class Stage {
 public:
  virtual ~Stage() = default;

  // The number of chunks, below 2³¹, given the job's counts. Called when all earlier stages are
  // over; but a thread that has lost its core for a while may also call it after the job, for no
  // use, while a later job runs the same stage: so it may read constants, counts and atomics only.
  virtual int64_t num_chunks(const int64_t* counts) const = 0;

  // Chunks of a stage write to different places and do not read what others of it write.
  virtual void run(int64_t chunk, const int64_t* counts, Scratch& scratch) const = 0;

  // Weights that a chunk reads, piece by piece until one is empty: for who wants to fetch them before.
  // A stage that has any is asked this, and num_chunks, at any time of the job; both may then read
  // constants and counts only.
  virtual Span weights(int64_t chunk, int piece, const int64_t* counts) const;
};

}  // namespace tokenline
