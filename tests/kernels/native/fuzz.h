// What the fuzzers share: random values of every kind, memory with a fence, and a digest of results.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "api.h"

namespace fuzz {

// Memory of exactly `count` values, aligned to 64 bytes: an address sanitizer sees what lies
// beyond.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : count_(count) {
    void* memory = nullptr;
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (posix_memalign(&memory, 64, bytes ? bytes : 1)) std::abort();
    values_.reset(static_cast<T*>(memory));
    // What nobody writes is the same in each run, and looks wrong.
    std::memset(memory, 0x5a, bytes);
  }

  T* data() const { return values_.get(); }
  T& operator[](int64_t i) const { return values_.get()[i]; }
  int64_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T* values) const { std::free(values); }
  };
  std::unique_ptr<T, Free> values_;
  int64_t count_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}

  // In [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits_() % static_cast<uint64_t>(high - low + 1));
  }
  bool coin() { return integer(0, 1) == 1; }
  uint64_t bits() { return bits_(); }
  // In [-1, 1), from integers alone: the same on every machine.
  float fraction() { return static_cast<float>(integer(-(1 << 23), (1 << 23) - 1)) / 0x1p23f; }
  // A value of a kind: ordinary, zero, huge, tiny, denormal, infinite, or all at once.
  float value(int64_t kind);
  // Rows that are each of one kind; `num_kinds` 4 leaves out what is not finite, 1 takes ordinary
  // ones only.
  void fill_rows(float* rows, int64_t num_rows, int64_t stride, int64_t width,
                 int64_t num_kinds = kKinds);

  static constexpr int64_t kKinds = 7;

 private:
  std::mt19937_64 bits_;
};

// The bits of a float, of which all NaNs have the same.
uint32_t bits_of(float value);

// Prints one line per case: what it was, and a digest of all that it gave.
class Digest {
 public:
  explicit Digest(std::string name) : name_(std::move(name)) {}
  ~Digest() { std::printf("%s %016llx\n", name_.c_str(), static_cast<unsigned long long>(hash_)); }

  void add(const float* values, int64_t count);
  void add_rows(const float* values, int64_t num_rows, int64_t stride, int64_t width);
  void add_bytes(const void* bytes, int64_t count);

 private:
  std::string name_;
  uint64_t hash_ = 14695981039346656037u;
};

// Ends the process where something does not hold.
void check(bool holds, const std::string& what);

// All floats of two results have the same bits.
bool are_equal(const float* a, const float* b, int64_t count);

// One thread, and more than there are cores.
struct Pools {
  TlPool* one = tl_pool_new(1);
  TlPool* many = tl_pool_new(4);
  ~Pools() {
    tl_pool_delete(one);
    tl_pool_delete(many);
  }
};

// A program of what `add` adds, run once on each pool; between the runs `again` clears what the
// first left.
void run_program(TlPool* pool, const std::function<void(TlProgram*)>& add,
                 std::vector<int64_t> counts);

// The fuzzers. Each runs `rounds` cases per op.
void fuzz_rows(Pools& pools, int rounds);
void fuzz_linear(Pools& pools, int rounds);
void fuzz_attention(Pools& pools, int rounds);
void fuzz_sampling(Pools& pools, int rounds);

}  // namespace fuzz
