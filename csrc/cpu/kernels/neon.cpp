// The kernels for one instruction set; CMakeLists.txt gives this file its compiler flags.
#include "simd_neon.h"
#include "table.h"

namespace ppsd {

const Kernels& neon_kernels() {
  static const Kernels kernels = table("neon");
  return kernels;
}

}  // namespace ppsd
