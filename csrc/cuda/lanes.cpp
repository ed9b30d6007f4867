#include "lanes.h"

#include <algorithm>

namespace ppsd::cuda {

EventRing::EventRing(Context context, int slots) : context_(context), events_(size_t(slots), nullptr) {
  check(driver().cuCtxSetCurrent(context), "choosing the GPU");
  for (EventHandle& event : events_) check(driver().cuEventCreate(&event, kDisableTiming), "making an event");
}

EventRing::~EventRing() {
  driver().cuCtxSetCurrent(context_);   // what fails while tearing down has no one to tell
  for (EventHandle event : events_)
    if (event != nullptr) driver().cuEventDestroy(event);
}

Lanes::Lanes(int draft_device, const std::vector<int>& verify_devices) {
  const KeptContext kept;
  try {
    // A smaller number is a higher priority; kernels in a graph bring the priority they were captured with.
    draft = make(draft_device, 0);
    for (int device : verify_devices) verify.push_back(make(device, -1));
    draft_done = std::make_unique<EventRing>(draft.context, kDraftSlots);
    for (const Lane& lane : verify) stage_done.push_back(std::make_unique<EventRing>(lane.context, kPassSlots));
  } catch (...) {
    release();
    throw;
  }
}

Lanes::~Lanes() {
  Context before = nullptr;
  const bool known = driver().cuCtxGetCurrent(&before) == kSuccess;
  release();
  if (known) driver().cuCtxSetCurrent(before);
}

void Lanes::release() {
  draft_done.reset();
  stage_done.clear();
  for (const Lane& lane : all())
    if (lane.stream != nullptr) {
      driver().cuCtxSetCurrent(lane.context);
      driver().cuStreamDestroy(lane.stream);
    }
  for (const auto& [device, context] : contexts_) driver().cuDevicePrimaryCtxRelease(device);
}

Context Lanes::context(int device) const {
  const auto found = std::find_if(contexts_.begin(), contexts_.end(), [&](const auto& pair) { return pair.first == device; });
  return found == contexts_.end() ? nullptr : found->second;
}

Lane Lanes::make(int ordinal, int priority) {
  const Driver& cu = driver();
  Device device = 0;
  check(cu.cuDeviceGet(&device, ordinal), "finding the GPU");
  Lane lane;
  lane.device = ordinal;
  lane.context = context(ordinal);
  if (lane.context == nullptr) {   // the primary context, which torch uses too
    check(cu.cuDevicePrimaryCtxRetain(&lane.context, device), "opening the GPU");
    contexts_.emplace_back(ordinal, lane.context);
  }
  check(cu.cuCtxSetCurrent(lane.context), "choosing the GPU");
  int least = 0, greatest = 0;
  check(cu.cuCtxGetStreamPriorityRange(&least, &greatest), "asking for priorities");
  check(cu.cuStreamCreateWithPriority(&lane.stream, kNonBlocking, std::max(greatest, std::min(least, priority))), "making a stream");
  return lane;
}

const Lane& Lanes::in_turns(int device) const {
  for (const Lane& lane : verify)
    if (lane.device == device) return lane;
  return draft;
}

std::vector<Lane> Lanes::all() const {
  std::vector<Lane> lanes{draft};
  lanes.insert(lanes.end(), verify.begin(), verify.end());
  return lanes;
}

std::vector<double> Lanes::run(int stage, const std::vector<GraphExec>& execs) {
  const Driver& cu = driver();
  const KeptContext kept;
  const Lane& lane = of(stage);
  check(cu.cuCtxSetCurrent(lane.context), "choosing the GPU");
  struct Events {
    std::vector<EventHandle> all;
    ~Events() {
      for (EventHandle event : all) driver().cuEventDestroy(event);
    }
    void record(Stream stream) {
      EventHandle event = nullptr;
      check(driver().cuEventCreate(&event, 0), "making an event");
      all.push_back(event);
      check(driver().cuEventRecord(event, stream), "recording an event");
    }
  } events;
  events.record(lane.stream);
  for (GraphExec exec : execs) {
    check(cu.cuGraphLaunch(exec, lane.stream), "launching a graph");
    events.record(lane.stream);
  }
  check(cu.cuStreamSynchronize(lane.stream), "waiting for the GPU");
  std::vector<double> seconds;
  for (size_t i = 0; i < execs.size(); ++i) {
    float milliseconds = 0.0f;
    check(cu.cuEventElapsedTime(&milliseconds, events.all[i], events.all[i + 1]), "reading the time");
    seconds.push_back(1e-3 * double(milliseconds));
  }
  return seconds;
}

}  // namespace ppsd::cuda
