// The entry points that Triton's launcher calls, and levers for tests. What the carrier calls is in fake_cuda.cpp, whose
// streams run the chains of launches that are captured here.
#include <cstring>

#include "../fake_cuda.h"
#include "machine.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags, int* status);

namespace {

using virtual_gpu::Fault;
using virtual_gpu::Kernel;
using virtual_gpu::Launch;
using virtual_gpu::Range;

constexpr int kInvalidValue = 1, kFailed = 719;

// Of CUDA's header, whose layouts Triton's launcher was compiled with.
struct LaunchAttribute {
  int id;
  char pad[4];
  char value[64];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
constexpr int kSerialization = 6;   // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

std::mutex mutex;
std::string fault;                       // the first one
std::vector<std::unique_ptr<std::vector<Launch>>> captured;
thread_local std::vector<Launch>* capturing = nullptr;
thread_local std::vector<Range> extents;   // of the arguments of the next launch

struct Module {
  std::shared_ptr<Kernel> kernel;
  int shared = 0;
};

void fails(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (fault.empty()) fault = line;
}

int run(void* chain) {
  try {
    virtual_gpu::machine().run(*static_cast<std::vector<Launch>*>(chain));
    return 0;
  } catch (const std::exception& error) {
    fails(error.what());
    return kFailed;
  }
}

template <class F> F of_fake(const char* name) {
  void* function = nullptr;
  int status = 0;
  cuGetProcAddress_v2(name, &function, 12000, 0, &status);
  return reinterpret_cast<F>(function);
}

}  // namespace

// -- what Triton's launcher calls ----------------------------------------------------------------------------------------

EXPORT int cuGetErrorString(int, const char** text) {
  static std::string line;
  const std::lock_guard<std::mutex> lock(mutex);
  line = fault.empty() ? "refused by the virtual GPU" : fault;
  *text = line.c_str();
  return 0;
}
EXPORT int cuDriverGetVersion(int* version) { return of_fake<int (*)(int*)>("cuDriverGetVersion")(version); }
EXPORT int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int kRegisters = 12, kMultiprocessors = 16, kSharedOptIn = 97, kShared = 81;
  *value = attribute == kRegisters ? 65536 : attribute == kMultiprocessors ? 8 : attribute == kSharedOptIn || attribute == kShared ? 227 * 1024 : 32;
  return 0;
}
EXPORT int cuCtxGetCurrent(void** context) { *context = &mutex; return 0; }
EXPORT int cuCtxSetCurrent(void*) { return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) { *context = &mutex; return 0; }
EXPORT int cuCtxGetLimit(size_t* value, int) { *value = 0; return 0; }
EXPORT int cuCtxSetLimit(int, size_t) { return 0; }
EXPORT int cuPointerGetAttribute(void* to, int, unsigned long long pointer) { std::memcpy(to, &pointer, 8); return 0; }
EXPORT int cuModuleLoadData(void** module, const void* text) {
  try {
    auto loaded = std::make_unique<Module>();
    loaded->kernel = std::make_shared<Kernel>(virtual_gpu::parse(static_cast<const char*>(text)));
    *module = loaded.release();   // for good: modules are not unloaded
    return 0;
  } catch (const std::exception& error) {
    fails(error.what());
    return kInvalidValue;
  }
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = module;
  return static_cast<Module*>(module)->kernel->name == name ? 0 : 500;
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = attribute == 0 ? static_cast<Module*>(function)->kernel->threads : 0;
  return 0;
}
EXPORT int cuFuncSetAttribute(void*, int, int) { return 0; }
EXPORT int cuFuncSetCacheConfig(void*, int) { return 0; }
EXPORT int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void**) {
  const Kernel& kernel = *static_cast<Module*>(function)->kernel;
  Launch launch;
  launch.kernel = static_cast<Module*>(function)->kernel;
  std::copy(config->grid, config->grid + 3, launch.size);
  launch.shared = int(config->shared);
  for (unsigned i = 0; i < config->count; ++i) {
    int on;
    std::memcpy(&on, config->attributes[i].value, 4);
    if (config->attributes[i].id == kSerialization) launch.dependent = on != 0;
    else return fails("a launch attribute that the virtual GPU does not know"), kInvalidValue;
  }
  if (int(config->block[0]) != kernel.threads || config->block[1] != 1 || config->block[2] != 1)
    return fails(kernel.name + ": the block is not what it was compiled for"), kInvalidValue;
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    uint64_t value = 0;
    std::memcpy(&value, parameters[i], size_t(kernel.parameters[i].first));
    launch.parameters.push_back(value);
  }
  launch.ranges.swap(extents);
  for (Range& range : launch.ranges)
    for (size_t i = 0; i < kernel.parameters.size(); ++i)
      range.parameters |= uint64_t(kernel.parameters[i].second && launch.parameters[i] == range.begin) << i;
  if (capturing != nullptr) {
    capturing->push_back(std::move(launch));
    return 0;
  }
  launch.dependent = false;   // on its own it runs at once
  std::vector<Launch> one;
  one.push_back(std::move(launch));
  return run(&one);
}

// -- levers --------------------------------------------------------------------------------------------------------------

// An argument of this thread's next launch.
EXPORT void virtual_gpu_argument(uint64_t begin, uint64_t bytes) {
  extents.push_back({begin, begin + bytes, 0});
  virtual_gpu::machine().learn(extents.back());
}
EXPORT void virtual_gpu_begin_capture() {
  captured.push_back(std::make_unique<std::vector<Launch>>());
  capturing = captured.back().get();
}
// A graph for the carrier: see cuGraphLaunch.
EXPORT void* virtual_gpu_end_capture() {
  std::vector<Launch>* chain = capturing;
  capturing = nullptr;
  return fake_cuda_graph(run, chain);
}
EXPORT void virtual_gpu_set(uint64_t seed, int audits, int adversary) {
  virtual_gpu::machine().seed(seed);
  virtual_gpu::machine().audits = audits != 0, virtual_gpu::machine().adversary = adversary != 0;
}
EXPORT void virtual_gpu_forget() { virtual_gpu::machine().forget(); }
EXPORT uint64_t virtual_gpu_instructions() { return virtual_gpu::machine().instructions; }
EXPORT uint64_t virtual_gpu_races() { return virtual_gpu::machine().races; }
EXPORT const char* virtual_gpu_first_race() { return virtual_gpu::machine().first_race.c_str(); }
// The first fault so far, or an empty line.
EXPORT const char* virtual_gpu_fault() {
  static std::string line;
  const std::lock_guard<std::mutex> lock(mutex);
  line = fault;
  return line.c_str();
}
EXPORT void virtual_gpu_forgive() {
  const std::lock_guard<std::mutex> lock(mutex);
  fault.clear();
}
