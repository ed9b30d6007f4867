// The kernels for one instruction set; CMakeLists.txt gives this file its compiler flags.
#include "simd_neon.h"
#include "table.h"

namespace ppsd {

const Kernels& dotprod_kernels() {
  static const Kernels kernels = table("dotprod");
  return kernels;
}

}  // namespace ppsd
