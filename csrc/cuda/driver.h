// The CUDA driver, found at run time: the extension is built without CUDA's headers and runs without its library.
//
// Only what the carrier needs is declared, with the types of the driver's C interface. Entry points are asked for by
// version through cuGetProcAddress: the plain name that a library exports may be an older function with other arguments.
// Every result is checked; what goes wrong is a DriverError of one line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ppsd::cuda {

using Result = int;
using Device = int;
using Address = unsigned long long;   // in device memory
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using EventHandle = struct EventTag*;
using Graph = struct GraphTag*;
using GraphExec = struct GraphExecTag*;

constexpr Result kSuccess = 0, kNotReady = 600;
constexpr unsigned kNonBlocking = 1;      // a stream that does not wait for the legacy default stream
constexpr unsigned kDisableTiming = 2;    // an event that only orders
constexpr int kComputeMajor = 75, kComputeMinor = 76;   // device attributes

// name, arguments; all return a Result.
#define PPSD_CUDA_FUNCTIONS(F)                                                    \
  F(cuInit, (unsigned flags))                                                     \
  F(cuDriverGetVersion, (int* version))                                           \
  F(cuDeviceGetCount, (int* count))                                               \
  F(cuDeviceGet, (Device* device, int ordinal))                                   \
  F(cuDeviceGetName, (char* name, int size, Device device))                       \
  F(cuDeviceGetAttribute, (int* value, int attribute, Device device))             \
  F(cuDevicePrimaryCtxRetain, (Context* context, Device device))                  \
  F(cuDevicePrimaryCtxRelease, (Device device))                                   \
  F(cuCtxGetCurrent, (Context* context))                                          \
  F(cuCtxSetCurrent, (Context context))                                           \
  F(cuCtxGetStreamPriorityRange, (int* least, int* greatest))                     \
  F(cuStreamCreateWithPriority, (Stream* stream, unsigned flags, int priority))   \
  F(cuStreamDestroy, (Stream stream))                                             \
  F(cuStreamSynchronize, (Stream stream))                                         \
  F(cuStreamQuery, (Stream stream))                                               \
  F(cuStreamWaitEvent, (Stream stream, EventHandle event, unsigned flags))              \
  F(cuEventCreate, (EventHandle* event, unsigned flags))                                \
  F(cuEventDestroy, (EventHandle event))                                                \
  F(cuEventRecord, (EventHandle event, Stream stream))                                  \
  F(cuEventQuery, (EventHandle event))                                                  \
  F(cuEventElapsedTime, (float* milliseconds, EventHandle begin, EventHandle end))            \
  F(cuGraphInstantiateWithFlags, (GraphExec* exec, Graph graph, unsigned long long flags)) \
  F(cuGraphExecDestroy, (GraphExec exec))                                         \
  F(cuGraphUpload, (GraphExec exec, Stream stream))                               \
  F(cuGraphLaunch, (GraphExec exec, Stream stream))                               \
  F(cuMemcpyPeerAsync, (Address to, Context to_context, Address from, Context from_context, size_t bytes, Stream stream)) \
  F(cuGetErrorName, (Result result, const char** name))                           \
  F(cuGetErrorString, (Result result, const char** text))

struct Driver {
#define PPSD_CUDA_POINTER(name, arguments) Result(*name) arguments = nullptr;
  PPSD_CUDA_FUNCTIONS(PPSD_CUDA_POINTER)
#undef PPSD_CUDA_POINTER
  int version = 0;   // of CUDA: 12030 is 12.3
};

struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kNeededVersion = 12000;   // CUDA 12.0: the interface that the entry points are asked for in

// Loaded and initialised on first use, once in a process. Library: libcuda.so.1, or what PPSD_CUDA_DRIVER names.
// Throws DriverError; the next call tries again.
const Driver& driver();

// Turns a result other than success into a DriverError: `what` was being done.
void check(Result result, const char* what);

// The calling thread's GPU is again what it was, when this goes.
class KeptContext {
 public:
  KeptContext() { check(driver().cuCtxGetCurrent(&context_), "asking for the GPU"); }
  ~KeptContext() { driver().cuCtxSetCurrent(context_); }
  KeptContext(const KeptContext&) = delete;
  KeptContext& operator=(const KeptContext&) = delete;

 private:
  Context context_ = nullptr;
};

// A GPU, as far as the carrier cares.
struct DeviceFacts {
  std::string name;
  int major = 0, minor = 0;   // compute capability
};
DeviceFacts device_facts(int ordinal);

}  // namespace ppsd::cuda
