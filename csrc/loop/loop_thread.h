// The loop in a thread of its own.
#pragma once

#include "loop.h"

namespace ppsd {

class LoopThread {
 public:
  explicit LoopThread(std::unique_ptr<Loop> loop) : loop_(std::move(loop)), thread_([this] { work(); }) {}   // throws NoThread
  ~LoopThread() { end(); }

  Loop& loop() { return *loop_; }
  void end() {   // nothing works on any answer from now on
    stop_.store(true);
    loop_->notify();
    thread_.join();
    loop_->end_all(nullptr);   // with the threads of its stages
  }

 private:
  void work() {
    loop_->pin_caller();
    while (!stop_.load()) {
      bool worked = false;
      try {
        worked = loop_->step();
      } catch (...) {   // of memory that is not there: no answer's own
        loop_->end_all(std::current_exception());
      }
      if (!worked && !stop_.load()) loop_->wait();
    }
  }

  const std::unique_ptr<Loop> loop_;
  std::atomic<bool> stop_{false};
  Thread thread_;
};

}  // namespace ppsd
