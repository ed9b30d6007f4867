// What the loop has made of one answer, on its way to whoever asked for it.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../core/event_queue.h"
#include "../core/thread.h"

namespace ppsd {

// Notified when there may be something to do. It outlives the loop that waits for it, for consumers may.
class Condition {
 public:
  void notify() {
    const std::lock_guard<std::mutex> lock(mutex_);
    notified_ = true;
    changed_.notify_all();
  }
  void wait(int milliseconds = -1) {   // until it has been notified since the last time, or for so long
    std::unique_lock<std::mutex> lock(mutex_);
    const auto notified = [this] { return notified_; };
    if (milliseconds < 0) changed_.wait(lock, notified);
    else changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), notified);
    notified_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool notified_ = false;
};

class AnswerEvents : public EventQueue {
 public:
  // condition: the loop's. prompt: its rows.
  AnswerEvents(std::shared_ptr<Condition> condition, int prompt)
      : EventQueue(true, [condition] { condition->notify(); }), condition_(std::move(condition)), prompt_(prompt) {}

  std::vector<uint16_t> kept;   // once it has ended, if they are wanted: the hidden states of its rows, see CpuPasses::kept

  // -- for the consumer --
  // Of the prompt: {rows that have passed the layers, rows that have to}, without those that earlier answers left.
  std::pair<int, int> prompt_rows() const {
    const int kept = kept_.load(), done = std::min(read_.load(), prompt_);
    return {std::max(done - kept, 0), prompt_ - kept};
  }
  void cancel() {
    cancelled_.store(true);
    condition_->notify();
  }
  void end() {   // cancels, and returns when the loop does not work on the answer any more
    cancel();
    wait_for_end();
  }

  // -- for the loop --
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  void begin(int kept) {   // time counts from the first call on
    if (begun_ != Clock::time_point{}) return;
    begun_ = Clock::now();
    kept_.store(kept);
    read_.store(kept);
  }
  void read(int rows) { read_.store(rows, std::memory_order_relaxed); }
  // What the consumer does while the work waits for it neither counts nor helps.
  void pause() {
    if (paused_ == Clock::time_point{}) paused_ = Clock::now();
  }
  void go_on() {
    if (paused_ != Clock::time_point{}) begun_ += Clock::now() - std::exchange(paused_, {});
  }
  void put(Event event) {   // the first is told at once, others with `tell`
    EventQueue::put(std::move(event), seconds_since(begun_));
  }

 private:
  using Clock = std::chrono::steady_clock;

  const std::shared_ptr<Condition> condition_;
  const int prompt_;
  std::atomic<bool> cancelled_{false};
  std::atomic<int> kept_{0}, read_{0};   // rows of the prompt
  Clock::time_point begun_{}, paused_{};
};

}  // namespace ppsd
