// Which kernels this build has for this machine, and which it should take.
#include "isa.h"

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace ppsd {
namespace {

#define PPSD_BUILT_FOR(NAME) {#NAME, NAME##_kernels},
const std::map<std::string, const Kernels& (*)()> kBuilt = {PPSD_BUILT};   // CMakeLists.txt names what it compiles

template <class Names>
std::string joined(const Names& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

}  // namespace

std::vector<std::string> built_kernels() {
  std::vector<std::string> names;
  for (const auto& [name, table] : kBuilt) names.push_back(name);
  return names;
}

std::vector<const Kernels*> usable_kernels() {   // best first
  std::vector<const Kernels*> usable;
  for (const std::string& name : instruction_sets()) {
    const auto built = kBuilt.find(name);
    if (built != kBuilt.end()) usable.push_back(&built->second());
  }
  return usable;
}

const Kernels& pick_kernels() {
  const auto usable = usable_kernels();
  if (usable.empty())
    throw std::runtime_error("this build has kernels for " + joined(built_kernels()) + ", and this machine for " +
                             joined(instruction_sets()) + ": build it here again with PPSD_KERNELS=native pip install .");
  const char* wanted = std::getenv("PPSD_ISA");
  if (wanted == nullptr || *wanted == '\0') return *usable.front();
  std::vector<std::string> names;
  for (const Kernels* kernels : usable) {
    if (std::string(wanted) == kernels->name) return *kernels;
    names.push_back(kernels->name);
  }
  for (const std::string& name : instruction_sets())
    if (name == wanted)
      throw std::runtime_error("PPSD_ISA=" + name + " is not in this build, which has " + joined(built_kernels()) +
                               ": build it again with PPSD_KERNELS=all pip install .");
  throw std::runtime_error("PPSD_ISA=" + std::string(wanted) + " is not one that this machine can run: " + joined(names));
}

static size_t words_of(const Kernels& kernels, Format activations, int rows, int width) {
  const size_t values = size_t(rows) * width;
  return activations == Format::kFp32 ? values : activations == Format::kBf16 ? values / 2 * kernels.bf16_words : values / 4;
}

size_t Activations::bytes(const Kernels& kernels, Format weights, int rows, int width) {
  const Format format = activations_of(weights);
  const size_t scales = format == Format::kInt8 ? size_t(rows) * width / kBlock * 20 : 0;   // corrections, sums and starts, too
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
    out.starts = out.corrections + 2 * blocks;
  }
  return out;
}

}  // namespace ppsd
