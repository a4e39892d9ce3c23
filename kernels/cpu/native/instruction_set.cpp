// Which instruction set this build uses, and which the machine has.
#include <cstring>

#include "api.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

#if defined(__x86_64__)
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kAvxVnni = 1u << 4;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvxVnni);
}

// Linux lets a process use the tile registers once it has asked for them, which makes a thread's saved
// state 8 KiB larger where it does use them.
bool may_use_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & (kTile | kInt8)) != (kTile | kInt8)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#if defined(TL_AMX)
// Whoever loads this build means to use it.
[[gnu::constructor]] void ask_for_amx() { may_use_amx(); }
#endif
#elif defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
  constexpr unsigned long kDotProduct = 1 << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & kDotProduct;
#else
  return true;  // all of Apple's have it
#endif
}
#endif

}  // namespace

const char* tl_interface(void) {
#if defined(TL_INTERFACE)
  return TL_INTERFACE;
#else
  return "";
#endif
}

const char* tl_instruction_set(void) {
#if defined(TL_AMX)
  return "amx";
#elif defined(TL_AVX512)
  return "avx512";
#elif defined(TL_AVXVNNI)
  return "avxvnni";
#elif defined(TL_AVX2)
  return "avx2";
#elif defined(TL_NEON)
  return "neon";
#else
  return "portable";
#endif
}

// By what the flags in build.py ask for.
int32_t tl_runs_here(const char* instruction_set) {
  const auto is = [&](const char* name) { return std::strcmp(instruction_set, name) == 0; };
  if (is("portable")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi2") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
  if (is("avx2")) return has_avx2;
  if (is("avxvnni")) return has_avx2 && has_avx_vnni();
  if (is("avx512")) return has_avx512;
  if (is("amx")) return has_avx512 && may_use_amx();
#elif defined(__aarch64__)
  if (is("neon")) return has_dot_product();
#endif
  return false;
}
