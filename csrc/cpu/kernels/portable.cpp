// The kernels for one instruction set; CMakeLists.txt gives this file its compiler flags.
#include "simd_portable.h"
#include "table.h"

namespace ppsd {

const Kernels& portable_kernels() {
  static const Kernels kernels = table("portable");
  return kernels;
}

}  // namespace ppsd
