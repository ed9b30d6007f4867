// The kernels for one instruction set; CMakeLists.txt gives this file its compiler flags, and the macro that takes tiles.h.
#include "simd_avx512.h"
#include "table.h"

namespace ppsd {

const Kernels& amx_kernels() {
  static const Kernels kernels = table("amx");
  return kernels;
}

}  // namespace ppsd
