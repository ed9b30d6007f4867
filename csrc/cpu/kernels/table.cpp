// The kernels, written once over `Simd` (simd_*.h). CMakeLists.txt compiles this file for each instruction set, with its compiler
// flags, which they must not escape: everything in these headers is in an unnamed namespace.
#include PPSD_SIMD

#include "attention.h"
#include "head.h"
#include "layer.h"
#include "noise.h"
#include "pack.h"

namespace ppsd {
namespace {

uint64_t stream(const uint8_t* data, size_t bytes) {
  I sum[16];
  for (I& s : sum) s = Simd::seti(0);
  const auto take = [&](I& into, size_t at) {
    into = Simd::bit_xor(into, Simd::loadi(reinterpret_cast<const int32_t*>(data + at)));
  };
  size_t from = 0;   // windows of pages in turn, and the rest one line after the other
  for (; from + kWindow <= bytes; from += kWindow)
    for (size_t at = 0; at < kPage; at += 64)
      for (size_t page = 0; page < kStreams; ++page) take(sum[at / 64 % 2 * kStreams + page], from + page * kPage + at);
  for (; from < bytes; from += 64) take(sum[from / 64 % 16], from);
  for (int i = 1; i < 16; ++i) sum[0] = Simd::bit_xor(sum[0], sum[i]);
  return uint64_t(Simd::sum_lanes(sum[0]));
}

Kernels table(const char* name) {
  return {name, Simd::kWeightOffset, Simd::kBf16Words, Simd::kRows, by_block, pack, pack_output, unpack, normalize, convert,
          qkv, attend, add, swiglu, logits, soft_sum, gumbel, choose, stream};
}

}  // namespace

const Kernels& PPSD_TIER() {
  static const Kernels kernels = table(PPSD_NAME);
  return kernels;
}

}  // namespace ppsd
