#include "outbox.h"

#include <utility>

namespace ppsd {

Outbox::Status Outbox::next(int milliseconds, Event* event, double* seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto ready = [this] { return !events_.empty() || over_; };
  if (!changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), ready)) return Status::kWaiting;
  if (events_.empty()) {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return Status::kEnded;
  }
  *event = std::move(events_.front().event);
  *seconds = events_.front().seconds;
  events_.pop_front();
  lock.unlock();
  if (waiting_.fetch_sub(1) == kAhead) bell_->ring();
  return Status::kEvent;
}

void Outbox::cancel() {
  cancelled_.store(true);
  bell_->ring();
}

void Outbox::end() {
  cancel();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return over_; });
}

void Outbox::begin() {
  if (begun_ == Clock::time_point{}) begun_ = Clock::now();
}

void Outbox::put(Event event) {
  const Clock::time_point now = Clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back({std::move(event), before_ + std::chrono::duration<double>(now - begun_).count()});
  if (waiting_.fetch_add(1) + 1 < kAhead / 2 && told_) return;
  told_ = true;
  changed_.notify_all();
}

void Outbox::tell() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!events_.empty()) changed_.notify_all();
}

void Outbox::finish(std::exception_ptr failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (over_) return;
  over_ = true;
  failure_ = failure;
  changed_.notify_all();
}

}  // namespace ppsd
