// What CMake runs for PPSD_KERNELS=native: prints the best kernels of this machine that the compiler can build.
#include <cstdio>

#include "isa.h"

int main() {
  for (const std::string& name : ppsd::instruction_sets()) {
    if (std::string(PPSD_CAN_BUILD).find("," + name + ",") == std::string::npos) continue;
    std::printf("%s", name.c_str());
    return 0;
  }
  return 1;
}
