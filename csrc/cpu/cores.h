// The cores that this process may use, best first.
#pragma once

#include <string>
#include <vector>

namespace ppsd {

struct Cores {
  std::vector<int> order;   // a fast core of every group of siblings, then a slow one of every group, then their siblings
  int best = 0;             // how many of them are of the first kind; 0: the system does not say which there are
};

constexpr const char* kDevices = "/sys/devices";

// system: where Linux tells of its devices. Slow ones are the efficiency cores of Intel's hybrids, and where the system has
// capacities (Arm's big.LITTLE) those below 0.7 of the largest: shares of a pass are of one size, so the slowest member
// would decide how long it takes.
Cores usable_cores(const std::string& system = kDevices);

// So many of these, from one on. Where there are fewer, none: the system places the threads.
std::vector<int> cores_from(const std::vector<int>& cores, int first, int count);

}  // namespace ppsd
