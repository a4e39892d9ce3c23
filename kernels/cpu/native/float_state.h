// How this thread's floats behave: for the length of a job as IEEE 754 has it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tokenline {

// Rounds to nearest and keeps denormals, while it lives. Libraries that were compiled with
// -ffast-math, and torch.set_flush_denormal, change this for single threads; then the bits of a
// result would depend on who computed it.
class FloatState {
 public:
#if defined(__x86_64__)
  FloatState() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatState() { _mm_setcsr(before_); }

 private:
  uint32_t before_;
#elif defined(__aarch64__)
  FloatState() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    set(0);
  }
  ~FloatState() { set(before_); }

 private:
  static void set(uint64_t state) { asm volatile("msr fpcr, %0" : : "r"(state)); }

  uint64_t before_;
#else
  FloatState() {}
  ~FloatState() {}

 private:
#endif
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;
};

}  // namespace tokenline
