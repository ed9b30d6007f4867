// The kernels for one instruction set; CMakeLists.txt gives this file its compiler flags.
#include "simd_avx512.h"
#include "table.h"

namespace ppsd {

const Kernels& avx512vnni_kernels() {
  static const Kernels kernels = table("avx512vnni");
  return kernels;
}

}  // namespace ppsd
