// Levers of the fake driver (fake_cuda.cpp), which the tests pull; found by dlsym in the library that they load.
#pragma once

#include <cstdint>

extern "C" {

// A graph whose launch calls `run(data)`, in the order of its stream. A result other than 0 breaks the GPU with it.
using FakeGraphRun = int (*)(void* data);
void* fake_cuda_graph(FakeGraphRun run, void* data);

// The `call`-th call of this entry point from now on (1: the next one) gives `result` and does nothing.
void fake_cuda_fail(const char* function, int call, int result);
// From the `call`-th call of anything from now on, every call gives `result`, and nothing runs any more.
void fake_cuda_lose(int call, int result);
void fake_cuda_stall(int on);   // what is queued waits
void fake_cuda_repair();        // forgets all of the above, and what is queued
int fake_cuda_streams();        // that exist
int fake_cuda_events();

// What has been called wrongly so far, as one line, or an empty one.
const char* fake_cuda_misuse();

// Calls that order work, as they were made.
struct FakeCudaCall {
  const char* function;   // cuGraphLaunch, cuEventRecord, cuStreamWaitEvent, cuMemcpyPeerAsync
  const void *stream, *object;
};
int fake_cuda_log(FakeCudaCall* calls, int most);   // copies the newest, oldest first; returns how many
void fake_cuda_clear_log();

}
