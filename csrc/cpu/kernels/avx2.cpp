// The kernels for one instruction set; CMakeLists.txt gives this file its compiler flags.
#include "simd_avx2.h"
#include "table.h"

namespace ppsd {

const Kernels& avx2_kernels() {
  static const Kernels kernels = table("avx2");
  return kernels;
}

}  // namespace ppsd
