// Which kernels this machine can run, and which it should.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(PPSD_X86_KERNELS)
#include <cpuid.h>
#endif
#if defined(PPSD_ARM_KERNELS) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(PPSD_ARM_KERNELS) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(PPSD_AMX_KERNELS)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ppsd {
namespace {

#if defined(PPSD_X86_KERNELS)
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
#if defined(PPSD_AMX_KERNELS)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }
  static bool bit(unsigned word, int at) { return (word >> at) & 1; }
};
#endif

#if defined(PPSD_ARM_KERNELS)
bool has_dot_product() {   // every AArch64 has NEON; its dot instruction came with Armv8.2
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

}  // namespace

std::vector<const Kernels*> usable_kernels() {   // best first
  std::vector<const Kernels*> usable;
#if defined(PPSD_X86_KERNELS)
  const Features has;
#if defined(PPSD_AMX_KERNELS)
  if (has.amx) usable.push_back(&amx_kernels());
#endif
  if (has.avx512) usable.push_back(&avx512_kernels());
  if (has.avx512vnni) usable.push_back(&avx512vnni_kernels());
  if (has.avxvnni) usable.push_back(&avxvnni_kernels());
  if (has.avx2) usable.push_back(&avx2_kernels());
#endif
#if defined(PPSD_ARM_KERNELS)
  if (has_dot_product()) usable.push_back(&dotprod_kernels());
  usable.push_back(&neon_kernels());
#endif
  usable.push_back(&portable_kernels());
  return usable;
}

const Kernels& pick_kernels() {
  const auto usable = usable_kernels();
  const char* wanted = std::getenv("PPSD_ISA");
  if (wanted == nullptr || *wanted == '\0') return *usable.front();
  std::string names;
  for (const Kernels* kernels : usable) {
    if (std::string(wanted) == kernels->name) return *kernels;
    names += std::string(names.empty() ? "" : ", ") + kernels->name;
  }
  throw std::runtime_error("PPSD_ISA=" + std::string(wanted) + " is not one that this machine can run: " + names);
}

static size_t words_of(const Kernels& kernels, Format activations, int rows, int width) {
  const size_t values = size_t(rows) * width;
  return activations == Format::kFp32 ? values : activations == Format::kBf16 ? values / 2 * kernels.bf16_words : values / 4;
}

size_t Activations::bytes(const Kernels& kernels, Format weights, int rows, int width) {
  const Format format = activations_of(weights);
  const size_t scales = format == Format::kInt8 ? size_t(rows) * width / kBlock * 12 : 0;   // corrections and sums, too
  const size_t beyond = kernels.by_block(weights, rows, width) ? 16 * kBlock : 0;   // read where the last tile has fewer rows
  return words_of(kernels, format, rows, width) * 4 + scales + beyond;
}

Activations Activations::at(const Kernels& kernels, uint8_t* memory, Format weights, int rows, int width) {
  const Format format = activations_of(weights);
  Activations out;
  out.format = format;
  out.width = width;
  out.rows = rows;
  out.by_block = kernels.by_block(weights, rows, width);
  out.together = out.by_block ? rows : kernels.rows;
  out.words = reinterpret_cast<uint32_t*>(memory);
  if (format == Format::kInt8) {
    out.scales = reinterpret_cast<float*>(out.words + words_of(kernels, format, rows, width));
    const size_t blocks = size_t(rows) * (width / kBlock);
    out.corrections = reinterpret_cast<int32_t*>(out.scales + blocks);
    out.minus_sums = out.scales + 2 * blocks;
  }
  return out;
}

}  // namespace ppsd
