// Which instruction sets with kernels this processor and system have. Alone, so that the build can ask it too
// (native_kernels.cpp); PPSD_X86 or PPSD_ARM says what the build is for.
#pragma once

#include <string>
#include <vector>

#if defined(PPSD_X86)
#include <cpuid.h>
#endif
#if defined(PPSD_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(PPSD_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(PPSD_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ppsd {

#if defined(PPSD_X86)
// Asked of the processor itself: __builtin_cpu_supports needs a run-time library that not every compiler brings along,
// and GCC 12 has no name for AVX-VNNI.
struct Features {
  bool avx2 = false, avxvnni = false, avx512vnni = false, avx512 = false, amx = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool saved = bit(c, 27), fma = bit(c, 12), f16c = bit(c, 29);
    if (!saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const bool tiles = bit(d, 22) && bit(d, 24) && bit(d, 25);   // bfloat16, the registers, int8
    unsigned state, high;   // which registers the system keeps when it switches threads
    asm volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    unsigned more = 0, unused;
    if (a >= 1) __get_cpuid_count(7, 1, &more, &unused, &unused, &unused);
    avx2 = (state & 0x06) == 0x06 && bit(b, 5) && fma && f16c;
    avxvnni = avx2 && bit(more, 4);
    const bool foundation = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);   // F, DQ, BW, VL
    avx512vnni = avx2 && (state & 0xE6) == 0xE6 && foundation && bit(c, 11);
    avx512 = avx512vnni && bit(more, 5);   // BF16
    amx = avx512 && tiles && (state & 0x60000) == 0x60000 && permitted();
  }
  // Linux lets a process use the tile registers only once it has asked.
  static bool permitted() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }
  static bool bit(unsigned word, int at) { return (word >> at) & 1; }
};
#endif

#if defined(PPSD_ARM)
inline bool has_dot_product() {   // every AArch64 has NEON; its dot instruction came with Armv8.2
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}
#endif

inline std::vector<std::string> instruction_sets() {   // best first
  std::vector<std::string> names;
#if defined(PPSD_X86)
  const Features has;
  if (has.amx) names.push_back("amx");
  if (has.avx512) names.push_back("avx512");
  if (has.avx512vnni) names.push_back("avx512vnni");
  if (has.avxvnni) names.push_back("avxvnni");
  if (has.avx2) names.push_back("avx2");
#endif
#if defined(PPSD_ARM)
  if (has_dot_product()) names.push_back("dotprod");
  names.push_back("neon");
#endif
  names.push_back("portable");
  return names;
}

}  // namespace ppsd
