// What the loop has made of one answer, on its way to whoever asked for it.
#pragma once

#include <memory>

#include "../pipeline/event_queue.h"

namespace ppsd {

// Rings when there may be something to do. It outlives the loop that waits for it, for consumers may.
class Bell {
 public:
  void ring() {
    const std::lock_guard<std::mutex> lock(mutex_);
    rung_ = true;
    changed_.notify_all();
  }
  void wait() {   // until it has been rung since the last time
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return rung_; });
    rung_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rung_ = false;
};

class Outbox {
 public:
  // bell: the loop's. seconds: of work before this.
  Outbox(std::shared_ptr<Bell> bell, double seconds)
      : bell_(std::move(bell)), before_(seconds), events_(Clock::duration::max(), [bell = bell_] { bell->ring(); }) {}

  // -- for the consumer; the names are those of Session --
  using Status = EventQueue::Status;
  Status next(int milliseconds, Event* event, double* seconds) { return events_.next(milliseconds, event, seconds); }
  void cancel() {
    cancelled_.store(true);
    bell_->ring();
  }
  void end() {   // cancels, and returns when the loop does not work on the answer any more
    cancel();
    events_.wait_for_end();
  }

  // -- for the loop --
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  bool full() const { return events_.full(); }   // the consumer is slow: work waits
  void begin() {   // time counts from the first call on
    if (begun_ == Clock::time_point{}) begun_ = Clock::now();
  }
  void put(Event event) {   // the first is told at once, others with `tell`
    events_.put(std::move(event), before_ + std::chrono::duration<double>(Clock::now() - begun_).count());
  }
  void tell() { events_.tell(); }
  void finish(std::exception_ptr failure = nullptr) { events_.finish(failure); }

 private:
  using Clock = EventQueue::Clock;

  const std::shared_ptr<Bell> bell_;
  const double before_;
  std::atomic<bool> cancelled_{false};
  EventQueue events_;
  Clock::time_point begun_{};
};

}  // namespace ppsd
