// Gumbel noise from Philox's bits: exactly, and bounded from above without a logarithm.
#pragma once

#include <cstdint>
#include <cstring>

#include "sampling_lanes.h"

namespace tokenline {

// ln x of a positive, normal x, to 4e-16 of it (measured); made of single IEEE operations, so that it
// is the same bits everywhere, which libraries' are not. x = 2^k · m with m next to 1, and
// ln m = 2 artanh(s) = 2 (s + s³/3 + s⁵/5 + …) with s = (m - 1) / (m + 1), |s| < 0.172.
inline double natural_log(double x) {
  constexpr uint64_t kSqrtHalf = 0x3FE6A09E667F3BCD;  // m is in [√½, √2)
  constexpr double kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  const int64_t k = static_cast<int64_t>(bits - kSqrtHalf) >> 52;
  bits -= static_cast<uint64_t>(k) << 52;
  double m;
  std::memcpy(&m, &bits, 8);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double series = 1.0 / 23.0;
  for (int odd = 21; odd >= 3; odd -= 2) series = series * z + 1.0 / odd;
  const double ln_m = 2.0 * s + 2.0 * s * (z * series);
  const double turns = static_cast<double>(k);
  return turns * kLn2High + (turns * kLn2Low + ln_m);
}

// -ln(-ln(1 - v)) with v = (bits + ½) / 2³², as kernels/noise.py has it: the float32 is the same
// unless the exact value lies within 1e-8 of the middle of two.
inline float gumbel(uint32_t bits) {
  // Exact, and so is 1 - v: both have 33 bits.
  const double v = (static_cast<double>(bits) + 0.5) * 0x1p-32;
  return static_cast<float>(-natural_log(-natural_log(1.0 - v)));
}

// No noise is larger: that of bits = 0 is 22.873857.
constexpr float kMostNoise = 22.874f;

// No less than the noise of 16 bits but for rounding, and little more where v is small. Noise is at
// most -ln v, since -ln(1 - v) >= v; and a float's bits, read as an integer, are its logarithm with
// straight lines between the powers of two, which lie below the curve.
TL_INLINE F32x16 noise_bound(I32x16 bits) {
  constexpr float kLn2 = 0.69314718f;
  // The 24 upper bits: a float holds them exactly, and v is no less.
  const F32x16 upper = to_float(shift_right<8>(bits));
  const F32x16 logarithm = to_float(as_int(upper));
  return broadcast((127 + 24) * kLn2) - logarithm * broadcast(kLn2 * 0x1p-23f);
}

}  // namespace tokenline
