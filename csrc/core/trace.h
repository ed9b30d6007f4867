// A timeline for Chrome's tracing page and Perfetto.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "protocol.h"

namespace ppsd {

constexpr int kDraftTrack = 0, kVerifyTrack = 1;   // verification stage s is track 1 + s

class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  struct Span {
    const char* name;   // a literal
    int track, rows;
    double begin_us, end_us;
  };

  // Spans are in microseconds since `origin`.
  explicit Trace(Clock::time_point origin = Clock::now()) : origin_(origin) {}

  void add(const char* name, int track, int rows, Clock::time_point begin, Clock::time_point end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    spans_.push_back({name, track, rows, micros(begin), micros(end)});
  }
  void mark(const char* name, int track, int rows) {   // a moment: now
    const Clock::time_point now = Clock::now();
    add(name, track, rows, now, now);
  }
  void add(const Span& span) {
    const std::lock_guard<std::mutex> lock(mutex_);
    spans_.push_back(span);
  }
  std::vector<Span> spans() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return spans_;
  }

 private:
  double micros(Clock::time_point t) const { return std::chrono::duration<double, std::micro>(t - origin_).count(); }

  const Clock::time_point origin_;
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

// The moment of an event. Whoever reports events marks every one, in their order: so times of events are found again
// (ppsd_rt/bench/watch/record.py).
inline void mark(Trace* trace, int verdict_track, const Event& event) {
  if (trace == nullptr) return;
  if (const auto* round = std::get_if<Round>(&event)) {
    const bool rejected = round->accepted < int(round->judged.size());
    trace->mark(rejected ? "roll back" : "commit", verdict_track, int(round->committed.size()));
  } else {
    trace->mark("drafted", kDraftTrack, 1);
  }
}

}  // namespace ppsd
