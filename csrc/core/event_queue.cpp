#include "event_queue.h"

#include <utility>

namespace ppsd {

bool EventQueue::wait(std::unique_lock<std::mutex>* lock, int milliseconds) {
  const auto there = [this] { return !events_.empty() || over_; };
  if (milliseconds == 0) return there();   // which an event loop asks of every answer, and a wait would enter the kernel for
  return changed_.wait_for(*lock, std::chrono::milliseconds(milliseconds), there);
}

bool EventQueue::ready(int milliseconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return wait(&lock, milliseconds);
}

EventQueue::Status EventQueue::next(int milliseconds, Event* event, double* seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!wait(&lock, milliseconds)) return Status::kWaiting;
  if (events_.empty()) {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return Status::kEnded;
  }
  *event = std::move(events_.front().event);
  *seconds = events_.front().seconds;
  events_.pop_front();
  if (waiting_.fetch_sub(1) != kAhead) return Status::kEvent;
  changed_.notify_all();   // who waits for room
  lock.unlock();
  if (room_) room_();
  return Status::kEvent;
}

void EventQueue::wait_for_end() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return over_; });
}

void EventQueue::let_go() {
  const std::lock_guard<std::mutex> lock(mutex_);
  let_go_ = true;
  changed_.notify_all();
}

void EventQueue::tell_by(std::shared_ptr<Notifier> notifier) {
  const std::lock_guard<std::mutex> lock(mutex_);
  notifier_ = std::move(notifier);
  if (!events_.empty() || over_) notifier_->notify();
}

void EventQueue::wake() {
  changed_.notify_all();
  if (notifier_) notifier_->notify();
}

void EventQueue::put(Event event, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back({std::move(event), seconds});
  if (waiting_.fetch_add(1) + 1 < kAhead / 2 && quiet_ && std::exchange(told_, true)) return;
  wake();
}

void EventQueue::tell() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!events_.empty()) wake();
}

void EventQueue::wait_for_room() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return int(events_.size()) < kAhead || let_go_; });
}

void EventQueue::finish(std::exception_ptr failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(over_, true)) return;
  failure_ = std::move(failure);
  wake();
}

}  // namespace ppsd
