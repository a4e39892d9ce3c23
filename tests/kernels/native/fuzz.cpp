// See fuzz.h. Run with the number of cases per op: prints a line for each.
#include "fuzz.h"

#include <cmath>
#include <limits>

namespace fuzz {

float Random::value(int64_t kind) {
  const float x = fraction();
  switch (kind) {
    case 0: return x * 4;
    case 1: return coin() ? 0.0f : -0.0f;
    case 2: return x * 1e4f;
    case 3: return x * 1e-20f;
    case 4: return x * 1e-39f;
    case 5: return x * 3e38f;
    default:
      switch (integer(0, 40)) {
        case 0: return std::numeric_limits<float>::quiet_NaN();
        case 1: return std::numeric_limits<float>::infinity();
        case 2: return -std::numeric_limits<float>::infinity();
        default: return value(integer(0, 5));
      }
  }
}

void Random::fill_rows(float* rows, int64_t num_rows, int64_t stride, int64_t width,
                       int64_t num_kinds) {
  for (int64_t row = 0; row < num_rows; row++) {
    // Half of the rows are ordinary.
    const int64_t kind = coin() ? 0 : integer(0, num_kinds - 1);
    for (int64_t i = 0; i < width; i++) rows[row * stride + i] = value(kind);
  }
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return std::isnan(value) ? 0x7fc00000 : bits;
}

void Digest::add(const float* values, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = bits_of(values[i]);
    add_bytes(&bits, 4);
  }
}

void Digest::add_rows(const float* values, int64_t num_rows, int64_t stride, int64_t width) {
  for (int64_t row = 0; row < num_rows; row++) add(values + row * stride, width);
}

// Fowler, Noll and Vo's FNV-1a.
void Digest::add_bytes(const void* bytes, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    hash_ = (hash_ ^ static_cast<const uint8_t*>(bytes)[i]) * 1099511628211u;
  }
}

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::fflush(stdout);
  std::fprintf(stderr, "does not hold: %s\n", what.c_str());
  std::abort();
}

bool are_equal(const float* a, const float* b, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (bits_of(a[i]) != bits_of(b[i])) return false;
  }
  return true;
}

void run_program(TlPool* pool, const std::function<void(TlProgram*)>& add,
                 std::vector<int64_t> counts) {
  TlProgram* program = tl_program_new();
  add(program);
  counts.resize(TL_NUM_COUNTS);
  tl_program_run(program, pool, counts.data());
  tl_program_delete(program);
}

}  // namespace fuzz

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 10;
  fuzz::Pools pools;
  fuzz::fuzz_rows(pools, rounds);
  fuzz::fuzz_linear(pools, rounds);
  fuzz::fuzz_attention(pools, rounds);
  fuzz::fuzz_sampling(pools, rounds);
  std::puts("all hold");
}
