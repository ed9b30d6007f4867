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

  // For measurements: launches these, each on its stage's stream (-1: the draft stage's), waits, and says when each
  // began and ended, in seconds, as its device stamped it.
  std::vector<std::pair<double, double>> timeline(const std::vector<std::pair<int, GraphExec>>& launches);

  std::unique_ptr<EventRing> draft_done;
  std::vector<std::unique_ptr<EventRing>> stage_done;   // of each verification stage

 private:
  Lane make(int device, int priority);
  void release();

  std::vector<std::pair<int, Context>> contexts_;
};

}  // namespace ppsd::cuda
