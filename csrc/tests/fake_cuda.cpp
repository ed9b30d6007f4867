// A CUDA driver without a GPU: streams are threads, graphs are functions, events are what they really are.
//
// It executes the protocol of streams and events, keeps a log of the calls that order work, and fails where it is told
// to. Environment, read by cuInit: PPSD_FAKE_CUDA_VERSION (12080), PPSD_FAKE_CUDA_DEVICES (2), PPSD_FAKE_CUDA_SM (90).
#include "fake_cuda.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../cuda/driver.h"

namespace {

using ppsd::cuda::Address;
using ppsd::cuda::Result;
using Clock = std::chrono::steady_clock;

constexpr Result kInvalidValue = 1, kInvalidHandle = 400, kNotReady = 600, kNotInitialised = 3, kNotFound = 500;

struct Event {
  bool timing = false;
  void* context = nullptr;
  uint64_t recorded = 0, completed = 0;   // generations
  Clock::time_point when{};
};

struct Stream {
  int device = 0;
  std::deque<std::function<void()>> queue;
  bool running = false, leaving = false;
  std::thread thread;
};

// What was captured.
struct Exec {
  FakeGraphRun run;
  void* data;
};

struct Fake {
  std::mutex mutex;
  std::condition_variable changed;
  bool initialised = false, stalled = false;
  int version = 12080, devices = 2, sm = 90;
  Result broken = 0;
  int lose_at = 0;
  Result lose_with = 0;
  int calls = 0;
  std::map<std::string, std::pair<int, Result>> failures;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::set<Event*> events;
  std::vector<std::unique_ptr<Event>> buried;
  std::vector<std::unique_ptr<Exec>> graphs;
  std::deque<FakeCudaCall> log;
  std::string misuse;
};

Fake& fake() {
  static Fake* state = new Fake;   // never destroyed: threads may outlive main
  return *state;
}

thread_local void* current_context = nullptr;
int devices_as_contexts[16];   // their addresses are the contexts

using Lock = std::unique_lock<std::mutex>;

void misused(const std::string& how) {
  if (fake().misuse.empty()) fake().misuse = how;
}

// What every call does first.
Result enter(const char* function) {
  Fake& f = fake();
  if (f.lose_at > 0 && --f.lose_at == 0) {
    f.broken = f.lose_with;
    f.changed.notify_all();
  }
  if (f.broken != 0) return f.broken;
  if (!f.initialised && std::strcmp(function, "cuInit") != 0) return kNotInitialised;
  const auto found = f.failures.find(function);
  if (found != f.failures.end() && --found->second.first == 0) {
    const Result result = found->second.second;
    f.failures.erase(found);
    return result;
  }
  return 0;
}

#define ENTER(function)             \
  Lock lock(fake().mutex);          \
  if (const Result early = enter(function)) return early

void record_call(const char* function, const void* stream, const void* object) {
  fake().log.push_back({function, stream, object});
  if (fake().log.size() > 200000) fake().log.pop_front();
}

// A stream's thread: one piece of work after the other. `work` is called without the lock.
void run_stream(std::shared_ptr<Stream> stream) {
  Fake& f = fake();
  Lock lock(f.mutex);
  for (;;) {
    f.changed.wait(lock, [&] { return (!stream->queue.empty() && !f.stalled) || stream->leaving; });
    if (stream->queue.empty() || f.broken != 0) {
      stream->queue.clear();
      if (stream->leaving) return;
      if (f.broken != 0) f.changed.wait(lock, [&] { return f.broken == 0 || stream->leaving; });
      continue;
    }
    const auto work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    lock.unlock();
    work();
    lock.lock();
    stream->running = false;
    f.changed.notify_all();
  }
}

Stream* stream_of(void* handle) {
  const auto found = fake().streams.find(handle);
  if (found == fake().streams.end()) return nullptr;
  if (current_context != &devices_as_contexts[found->second->device]) misused("a stream was used in another GPU's context");
  return found->second.get();
}

Event* event_of(void* handle) {
  Event* event = static_cast<Event*>(handle);
  return fake().events.count(event) ? event : nullptr;
}

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// -- entry points ------------------------------------------------------------------------------------------------------

Result cuInit(unsigned) {
  ENTER("cuInit");
  Fake& f = fake();
  f.version = number("PPSD_FAKE_CUDA_VERSION", f.version);
  f.devices = number("PPSD_FAKE_CUDA_DEVICES", f.devices);
  f.sm = number("PPSD_FAKE_CUDA_SM", f.sm);
  if (f.devices == 0) return 100;
  f.initialised = true;
  return 0;
}
Result cuDriverGetVersion(int* version) {
  ENTER("cuDriverGetVersion");
  *version = fake().version;
  return 0;
}
Result cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = fake().devices;
  return 0;
}
Result cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= fake().devices) return 101;
  *device = ordinal;
  return 0;
}
Result cuDeviceGetName(char* name, int size, int) {
  ENTER("cuDeviceGetName");
  std::strncpy(name, "Fake GPU", size_t(size));
  return 0;
}
Result cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER("cuDeviceGetAttribute");
  *value = attribute == ppsd::cuda::kComputeMajor ? fake().sm / 10 : attribute == ppsd::cuda::kComputeMinor ? fake().sm % 10 : 0;
  return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = &devices_as_contexts[device];
  return 0;
}
Result cuDevicePrimaryCtxRelease(int) {
  ENTER("cuDevicePrimaryCtxRelease");
  return 0;
}
Result cuCtxGetCurrent(void** context) {
  ENTER("cuCtxGetCurrent");
  *context = current_context;
  return 0;
}
Result cuCtxSetCurrent(void* context) {
  ENTER("cuCtxSetCurrent");
  current_context = context;
  return 0;
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER("cuCtxGetStreamPriorityRange");
  *least = 0, *greatest = -5;
  return 0;
}
Result cuStreamCreateWithPriority(void** handle, unsigned, int) {
  ENTER("cuStreamCreateWithPriority");
  if (current_context == nullptr) return 201;
  auto stream = std::make_shared<Stream>();
  stream->device = int(static_cast<int*>(current_context) - devices_as_contexts);
  stream->thread = std::thread(run_stream, stream);
  *handle = stream.get();
  fake().streams[*handle] = std::move(stream);
  return 0;
}
// What is queued still runs; the call does not wait for it, but the fake does, unless it is stalled or broken.
Result cuStreamDestroy(void* handle) {
  Lock lock(fake().mutex);
  const auto found = fake().streams.find(handle);
  if (found == fake().streams.end()) return kInvalidHandle;
  const std::shared_ptr<Stream> stream = found->second;
  fake().streams.erase(found);
  stream->leaving = true;
  if (fake().stalled) stream->queue.clear();
  fake().changed.notify_all();
  lock.unlock();
  stream->thread.join();
  return 0;
}
Result cuStreamSynchronize(void* handle) {
  ENTER("cuStreamSynchronize");
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  fake().changed.wait(lock, [&] { return fake().broken != 0 || (stream->queue.empty() && !stream->running); });
  return fake().broken;
}
Result cuStreamQuery(void* handle) {
  ENTER("cuStreamQuery");
  const Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->queue.empty() && !stream->running ? 0 : kNotReady;
}
Result cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  ENTER("cuStreamWaitEvent");
  Stream* stream = stream_of(handle);
  Event* event = event_of(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  const uint64_t generation = event->recorded;
  if (generation == 0) misused("a stream was told to wait for an event that has not been recorded: it does not wait");
  record_call("cuStreamWaitEvent", handle, event);
  stream->queue.push_back([event, generation] {
    Lock inner(fake().mutex);
    fake().changed.wait(inner, [&] { return event->completed >= generation || fake().broken != 0; });
  });
  fake().changed.notify_all();
  return 0;
}
Result cuEventCreate(void** handle, unsigned flags) {
  ENTER("cuEventCreate");
  if (current_context == nullptr) return 201;
  auto* event = new Event;
  event->context = current_context;
  event->timing = (flags & ppsd::cuda::kDisableTiming) == 0;
  fake().events.insert(event);
  *handle = event;
  return 0;
}
Result cuEventDestroy(void* handle) {
  Lock lock(fake().mutex);
  Event* event = event_of(handle);
  if (event == nullptr) return kInvalidHandle;
  if (event->completed < event->recorded && fake().broken == 0 && !fake().stalled) misused("an event was destroyed before it was complete");
  fake().events.erase(event);
  fake().buried.emplace_back(event);   // a stream may still come to it
  return 0;
}
Result cuEventRecord(void* event_handle, void* handle) {
  ENTER("cuEventRecord");
  Stream* stream = stream_of(handle);
  Event* event = event_of(event_handle);
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (event->completed < event->recorded) misused("an event was recorded again while its last launch was in flight");
  if (event->context != &devices_as_contexts[stream->device]) misused("an event was recorded on another GPU's stream");
  const uint64_t generation = ++event->recorded;
  record_call("cuEventRecord", handle, event);
  stream->queue.push_back([event, generation] {
    const Lock inner(fake().mutex);
    event->completed = generation;
    event->when = Clock::now();
    fake().changed.notify_all();
  });
  fake().changed.notify_all();
  return 0;
}
Result cuEventQuery(void* handle) {
  ENTER("cuEventQuery");
  const Event* event = event_of(handle);
  if (event == nullptr) return kInvalidHandle;
  return event->completed == event->recorded ? 0 : kNotReady;
}
Result cuEventElapsedTime(float* milliseconds, void* begin_handle, void* end_handle) {
  ENTER("cuEventElapsedTime");
  const Event *begin = event_of(begin_handle), *end = event_of(end_handle);
  if (begin == nullptr || end == nullptr || !begin->timing || !end->timing) return kInvalidHandle;
  if (begin->context != end->context) return kInvalidHandle;   // clocks of two GPUs
  if (begin->completed < begin->recorded || end->completed < end->recorded) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
  return 0;
}
Result cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
  ENTER("cuGraphInstantiateWithFlags");
  *exec = graph;   // a graph is as good as an executable one here
  return graph == nullptr ? kInvalidValue : 0;
}
Result cuGraphExecDestroy(void*) {
  ENTER("cuGraphExecDestroy");
  return 0;
}
Result cuGraphUpload(void*, void*) {
  ENTER("cuGraphUpload");
  return 0;
}
Result cuGraphLaunch(void* handle, void* stream_handle) {
  ENTER("cuGraphLaunch");
  Stream* stream = stream_of(stream_handle);
  if (stream == nullptr || handle == nullptr) return kInvalidHandle;
  const Exec* exec = static_cast<Exec*>(handle);
  record_call("cuGraphLaunch", stream_handle, handle);
  stream->queue.push_back([exec] {
    if (const Result result = exec->run(exec->data)) {
      const Lock inner(fake().mutex);
      fake().broken = result;
      fake().changed.notify_all();
    }
  });
  fake().changed.notify_all();
  return 0;
}
Result cuMemcpyPeerAsync(Address to, void* to_context, Address from, void* from_context, size_t bytes, void* handle) {
  ENTER("cuMemcpyPeerAsync");
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (to_context == nullptr || from_context == nullptr) return 201;
  if (to_context == from_context) misused("a copy from a GPU to itself");
  record_call("cuMemcpyPeerAsync", handle, reinterpret_cast<const void*>(to));
  // Word by word: rows that a stage is writing meanwhile are copied too, and not used.
  stream->queue.push_back([=] {
    auto* target = reinterpret_cast<uint32_t*>(to);
    const auto* source = reinterpret_cast<const uint32_t*>(from);
    for (size_t i = 0; i < bytes / 4; ++i)
      __atomic_store_n(target + i, __atomic_load_n(source + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
  });
  fake().changed.notify_all();
  return 0;
}
Result cuGetErrorName(Result result, const char** name) {
  static const std::map<Result, const char*> names = {
      {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {100, "CUDA_ERROR_NO_DEVICE"}, {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {999, "CUDA_ERROR_UNKNOWN"}, {400, "CUDA_ERROR_INVALID_HANDLE"}};
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : 0;
}
Result cuGetErrorString(Result, const char** text) {
  *text = "by the fake driver";
  return 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Result cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
  static const std::map<std::string, void*> functions = {
#define PPSD_FAKE(function, arguments) {#function, reinterpret_cast<void*>(&function)},
      PPSD_CUDA_FUNCTIONS(PPSD_FAKE)
  };
#undef PPSD_FAKE
  const auto found = functions.find(name);
  *function = found == functions.end() ? nullptr : found->second;
  if (status != nullptr) *status = found == functions.end() ? 1 : 0;
  const char* without = std::getenv("PPSD_FAKE_CUDA_WITHOUT");   // an entry point that this driver is too old for
  if (without != nullptr && std::string(without) == name) *function = nullptr;
  return *function == nullptr ? kNotFound : 0;
}

EXPORT void* fake_cuda_graph(FakeGraphRun run, void* data) {
  const Lock lock(fake().mutex);
  fake().graphs.push_back(std::make_unique<Exec>(Exec{run, data}));
  return fake().graphs.back().get();
}
EXPORT void fake_cuda_fail(const char* function, int call, int result) {
  const Lock lock(fake().mutex);
  fake().failures[function] = {call, result};
}
EXPORT void fake_cuda_lose(int call, int result) {
  const Lock lock(fake().mutex);
  fake().lose_at = call, fake().lose_with = result;
}
EXPORT void fake_cuda_stall(int on) {
  const Lock lock(fake().mutex);
  fake().stalled = on != 0;
  fake().changed.notify_all();
}
EXPORT void fake_cuda_repair() {
  Lock lock(fake().mutex);
  Fake& f = fake();
  for (const auto& [handle, stream] : f.streams) stream->queue.clear();
  for (Event* event : f.events) event->completed = event->recorded;   // whoever waits, waits no longer
  f.stalled = false;
  f.changed.notify_all();
  f.changed.wait(lock, [&] {
    for (const auto& [handle, stream] : f.streams)
      if (stream->running) return false;
    return true;
  });
  f.broken = 0, f.lose_at = 0;
  f.failures.clear();
  f.misuse.clear();
  f.changed.notify_all();
}
EXPORT int fake_cuda_streams() {
  const Lock lock(fake().mutex);
  return int(fake().streams.size());
}
EXPORT int fake_cuda_events() {
  const Lock lock(fake().mutex);
  return int(fake().events.size());
}
EXPORT const char* fake_cuda_misuse() {
  const Lock lock(fake().mutex);
  static std::string line;
  line = fake().misuse;
  return line.c_str();
}
EXPORT int fake_cuda_log(FakeCudaCall* calls, int most) {
  const Lock lock(fake().mutex);
  const size_t count = std::min(size_t(most), fake().log.size());
  std::copy(fake().log.end() - long(count), fake().log.end(), calls);
  return int(count);
}
EXPORT void fake_cuda_clear_log() {
  const Lock lock(fake().mutex);
  fake().log.clear();
}
