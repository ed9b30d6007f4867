// Streams of the stages of one model, and the events that order them. Made once, used by one answer after the other.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "driver.h"

namespace ppsd::cuda {

// A stream on a device; launches on it take turns.
struct Lane {
  int device = 0;
  Context context = nullptr;
  Stream stream = nullptr;
};

// Events for the launches of one kind, a fresh one for each that may be in flight.
//
// A consumer's wait must be queued after the record call: waiting for an event that has not been recorded is no wait.
class EventRing {
 public:
  EventRing(Context context, int slots);
  ~EventRing();
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  EventHandle at(int64_t launch) const { return events_[size_t(launch) % events_.size()]; }

 private:
  Context context_;
  std::vector<EventHandle> events_;
};

class Lanes {
 public:
  static constexpr int kDraftSlots = 128, kPassSlots = 32;   // more than the plan ever has in flight

  // The device of the draft stage and of each verification stage. Verification goes first where both want to run.
  Lanes(int draft_device, const std::vector<int>& verify_devices);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  Lane draft;
  std::vector<Lane> verify;
  // Without overlap, stages of one device share a stream: their order needs no events.
  const Lane& in_turns(int device) const;
  std::vector<Lane> all() const;
  Context context(int device) const;

  const Lane& of(int stage) const { return stage < 0 ? draft : verify.at(size_t(stage)); }   // -1: the draft stage's

  // Launches these one after the other on a stage's stream, waits, and says how many seconds each took on the device.
  std::vector<double> run(int stage, const std::vector<GraphExec>& execs);

  std::unique_ptr<EventRing> draft_done;
  std::vector<std::unique_ptr<EventRing>> stage_done;   // of each verification stage

 private:
  Lane make(int device, int priority);
  void release();

  std::vector<std::pair<int, Context>> contexts_;
};

}  // namespace ppsd::cuda
