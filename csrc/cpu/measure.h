// Measurements: of the machine, of single kernels, and of the costs that the planner works with.
#pragma once

#include <string>
#include <vector>

#include "engine.h"

namespace ppsd {

// GB/s of reading `megabytes` that no cache holds, `threads` threads on cores of their own; the best of several runs.
double read_bandwidth(int threads, int megabytes);

// One kernel over all layers of the model (so that the weights come from memory, as in decoding).
struct KernelTime {
  double seconds;   // of one sweep over all layers: median
  double least, most;
  double bytes;     // of weights (or cache) that a sweep reads
  double flops;     // that a sweep does
};
std::vector<std::string> kernel_names();
KernelTime time_kernel(CpuEngine* engine, const std::string& name, int rows, int context, int repeats);

}  // namespace ppsd
