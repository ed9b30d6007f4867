// What the loop has made of one answer, on its way to whoever asked for it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

#include "../pipeline/carrier.h"

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
  Outbox(std::shared_ptr<Bell> bell, double seconds) : bell_(std::move(bell)), before_(seconds) {}

  // -- for the consumer; the names are those of Session --
  enum class Status { kEvent, kEnded, kWaiting };
  Status next(int milliseconds, Event* event, double* seconds);
  void cancel();
  void end();   // cancels, and returns when the loop does not work on the answer any more

  // -- for the loop --
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  bool full() const { return waiting_.load(std::memory_order_relaxed) >= kAhead; }   // the consumer is slow: work waits
  void begin();   // time counts from the first call on
  void put(Event event);   // the first is told at once, others with `tell`
  void tell();
  void finish(std::exception_ptr failure = nullptr);

 private:
  static constexpr int kAhead = 64;
  using Clock = std::chrono::steady_clock;
  struct Stamped {
    Event event;
    double seconds;
  };

  const std::shared_ptr<Bell> bell_;
  const double before_;
  std::atomic<bool> cancelled_{false};
  std::atomic<int> waiting_{0};   // events
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Stamped> events_;
  bool over_ = false;
  std::exception_ptr failure_;
  bool told_ = false;
  Clock::time_point begun_{};
};

}  // namespace ppsd
