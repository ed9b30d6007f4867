#include "priority.h"

#if defined(__linux__)
#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#endif

namespace ppsd {

#if defined(__linux__) && defined(SYS_sched_getattr)
namespace {

struct Attributes {   // the kernel's sched_attr, first version
  uint32_t size = sizeof(Attributes), policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;
};

constexpr uint64_t kSlice = 100000;   // ns; the shortest there is

bool works_in_a_team(const std::string& thread) {
  std::ifstream file("/proc/self/task/" + thread + "/comm");
  std::string name;
  std::getline(file, name);
  return name == "ppsd-team";
}

}  // namespace

void prefer_messages() {
  DIR* folder = opendir("/proc/self/task");
  if (folder == nullptr) return;
  const long self = syscall(SYS_gettid);
  while (const dirent* entry = readdir(folder)) {
    const long thread = std::atol(entry->d_name);
    Attributes attributes;
    if (thread <= 0 || thread == self || works_in_a_team(entry->d_name)) continue;
    if (syscall(SYS_sched_getattr, thread, &attributes, sizeof attributes, 0) != 0 || attributes.policy != SCHED_OTHER) continue;
    attributes.runtime = kSlice;
    attributes.flags = 0;
    syscall(SYS_sched_setattr, thread, &attributes, 0);
  }
  closedir(folder);
}
#else
void prefer_messages() {}
#endif

}  // namespace ppsd
