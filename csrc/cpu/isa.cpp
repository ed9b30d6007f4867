// Which kernels this machine can run, and which it should.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace ppsd {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avxvnni() {
  if (!has_avx2()) return false;
  unsigned a = 7, b = 0, c = 1, d = 0;   // leaf 7, subleaf 1: EAX bit 4 (GCC 12 has no name for it here)
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (a >> 4) & 1;
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16") && has_avx2();
}
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {   // best first
  std::vector<const Kernels*> usable;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_avx512()) usable.push_back(&avx512_kernels());
  if (has_avxvnni()) usable.push_back(&avxvnni_kernels());
  if (has_avx2()) usable.push_back(&avx2_kernels());
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

Activations Activations::at(uint8_t* memory, Format format, int rows, int width) {
  Activations out;
  out.format = format;
  out.width = width;
  out.rows = rows;
  out.words = reinterpret_cast<uint32_t*>(memory);
  if (format == Format::kInt8) {
    out.scales = reinterpret_cast<float*>(out.words + size_t(rows) * words_of(format, width));
    out.corrections = reinterpret_cast<int32_t*>(out.scales + size_t(rows) * (width / kBlock));
  }
  return out;
}

}  // namespace ppsd
