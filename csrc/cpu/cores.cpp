#include "cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

namespace ppsd {
namespace {

#if defined(__linux__)
std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "0-3,8" as its numbers.
std::set<int> numbers_of(const std::string& list) {
  std::set<int> out;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    int from, to;
    const int read = std::sscanf(range.c_str(), "%d-%d", &from, &to);
    if (read < 1) continue;
    for (int i = from; i <= (read == 2 ? to : from); ++i) out.insert(i);
  }
  return out;
}

// Those of `cores` that are as fast as any; all of them where nothing is known, or where none is of the fast kind.
std::set<int> fast_ones(const std::vector<int>& cores, const std::string& system) {
  const std::set<int> performance = numbers_of(first_line(system + "/cpu_core/cpus"));
  std::map<int, double> capacity;
  double largest = 0.0;
  for (const int core : cores) {
    std::ifstream file(system + "/system/cpu/cpu" + std::to_string(core) + "/cpu_capacity");
    if (!(file >> capacity[core])) capacity[core] = 0.0;
    largest = std::max(largest, capacity[core]);
  }
  std::set<int> fast;
  for (const int core : cores)
    if ((performance.empty() || performance.count(core) > 0) && capacity[core] >= 0.7 * largest) fast.insert(core);
  return fast.empty() ? std::set<int>(cores.begin(), cores.end()) : fast;
}
#endif

}  // namespace

Cores usable_cores([[maybe_unused]] const std::string& system) {
  Cores out;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return out;
  std::vector<int> all, slow, siblings;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) all.push_back(core);
  const std::set<int> fast = fast_ones(all, system);
  std::set<std::string> seen;
  for (const int core : all) {
    const std::string group = first_line(system + "/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list");
    const bool is_first = group.empty() || seen.insert(group).second;
    (!is_first ? siblings : fast.count(core) > 0 ? out.order : slow).push_back(core);
  }
  out.best = int(out.order.size());
  out.order.insert(out.order.end(), slow.begin(), slow.end());
  out.order.insert(out.order.end(), siblings.begin(), siblings.end());
#endif
  return out;
}

std::vector<int> cores_from(const std::vector<int>& cores, int first, int count) {
  if (first + count > int(cores.size())) return {};
  return {cores.begin() + first, cores.begin() + first + count};
}

}  // namespace ppsd
