#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

namespace ppsd::cuda {
namespace {

using GetProcAddress = Result (*)(const char* name, void** function, int version, unsigned long long flags, int* status);

constexpr Result kNoDevice = 100;

// The numbers are those of the driver's CUresult.
const char* meaning_of(Result result) {
  switch (result) {
    case 2: return "the GPU is out of memory";
    case kNoDevice: case 101: return "there is no such GPU";
    case 34: case 36: case 803: case 804: return "the NVIDIA driver is too old";   // a stub, an old call, an older kernel module
    case 700: case 701: case 702: case 710: case 714: case 715: case 716: case 717: case 718: case 719: case 720:
      return "a kernel failed on the GPU";   // illegal addresses and instructions, resources, timeouts
    case 4: case 46: case 214: case 220: case 226: case 709: case 999: return "the GPU is lost";   // gone, ECC, NVLink, ...
    default: return "the NVIDIA driver refused";
  }
}

// Opened for good: a driver's threads do not survive being unloaded.
void* open_library() {
  const char* named = std::getenv("PPSD_CUDA_DRIVER");
  const std::string path = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw DriverError("no NVIDIA driver: " + std::string(why ? why : path + " cannot be opened"));
  }
  return library;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

[[noreturn]] void too_old(const std::string& what) {
  throw DriverError("the NVIDIA driver is too old: " + what + "; CUDA " +
                                        version_text(kNeededVersion) + " or newer is needed");
}

std::unique_ptr<Driver> load() {
  void* library = open_library();
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) too_old("it has no cuGetProcAddress_v2");
  auto loaded = std::make_unique<Driver>();
  const auto find = [&](const char* name) {
    void* function = nullptr;
    int status = 0;
    if (get(name, &function, kNeededVersion, 0, &status) != kSuccess || function == nullptr) too_old("it has no " + std::string(name));
    return function;
  };
#define PPSD_CUDA_FIND(name, arguments) loaded->name = reinterpret_cast<decltype(loaded->name)>(find(#name));
  PPSD_CUDA_FUNCTIONS(PPSD_CUDA_FIND)
#undef PPSD_CUDA_FIND
  const Result started = loaded->cuInit(0);
  if (started != kSuccess) {
    const char* name = nullptr;
    loaded->cuGetErrorName(started, &name);
    const std::string why = name ? name : "error " + std::to_string(started);
    throw DriverError((started == kNoDevice ? "the NVIDIA driver sees no GPU (" : "the NVIDIA driver does not start (") + why + ")");
  }
  if (loaded->cuDriverGetVersion(&loaded->version) == kSuccess && loaded->version < kNeededVersion)
    too_old("it speaks CUDA " + version_text(loaded->version));
  return loaded;
}

}  // namespace

const Driver& driver() {
  static std::mutex mutex;
  static std::unique_ptr<Driver> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!loaded) loaded = load();
  return *loaded;
}

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  const std::string why = std::string(name ? name : "error " + std::to_string(result)) + (text ? std::string(", ") + text : "");
  throw DriverError(std::string(meaning_of(result)) + " (" + what + ": " + why + ")");
}

DeviceFacts device_facts(int ordinal) {
  const Driver& cu = driver();
  int count = 0;
  check(cu.cuDeviceGetCount(&count), "counting GPUs");
  if (ordinal < 0 || ordinal >= count)
    throw DriverError("there is no GPU " + std::to_string(ordinal) + ": the driver sees " + std::to_string(count));
  Device device = 0;
  check(cu.cuDeviceGet(&device, ordinal), "finding the GPU");
  DeviceFacts facts;
  char name[128] = {};
  check(cu.cuDeviceGetName(name, int(sizeof name) - 1, device), "asking for the GPU's name");
  facts.name = name;
  check(cu.cuDeviceGetAttribute(&facts.major, kComputeMajor, device), "asking for the GPU's generation");
  check(cu.cuDeviceGetAttribute(&facts.minor, kComputeMinor, device), "asking for the GPU's generation");
  return facts;
}

}  // namespace ppsd::cuda
