// Measurements: of the machine, of single kernels, and of the costs that the planner works with.
#pragma once

#include <string>
#include <vector>

#include "checkpoint.h"

namespace ppsd {

// GB/s of reading `megabytes` that no cache holds, `threads` threads on cores of their own; the best of several runs.
double read_bandwidth(int threads, int megabytes);

// One kernel over all layers of the model, from such caches as it finds in a pass: the weights of the others go through
// them before.
struct KernelTime {
  double seconds;   // of one sweep over all layers: median
  double least, most;
  double bytes;     // of weights (or cache) that a sweep reads
  double flops;     // that a sweep does
};
std::vector<std::string> kernel_names();
KernelTime time_kernel(const CpuModel& model, Team& team, const std::string& name, int rows, int context, int repeats);

}  // namespace ppsd
