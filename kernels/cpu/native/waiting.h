// Waiting without giving the core away: for what comes within microseconds.
#pragma once

#include <chrono>

namespace tokenline {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // Where `yield` does nothing, this takes as long as x86's pause.
  asm volatile("isb");
#endif
}

// Seconds of a clock that only goes forward.
inline double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Until is_done(), or until so many seconds have passed; says whether it is done. Measured by the
// clock, since a pause takes from 10 to 150 cycles.
template <class Condition>
bool spin(double seconds, Condition is_done) {
  constexpr int kPausesPerLook = 32;
  double end = 0;
  for (int pauses = 1;; pauses++) {
    if (is_done()) return true;
    pause();
    if (pauses % kPausesPerLook == 0) {
      const double time = now();
      if (end == 0) end = time + seconds;
      if (time >= end) return false;
    }
  }
}

}  // namespace tokenline
