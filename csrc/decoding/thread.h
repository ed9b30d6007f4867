// The loop in a thread of its own.
#pragma once

#include "loop.h"

namespace ppsd {

class LoopThread {
 public:
  explicit LoopThread(std::unique_ptr<Loop> loop);   // throws NoThread
  ~LoopThread();                                     // ends all answers

  Loop& loop() { return *loop_; }
  void end();   // nothing works on any answer from now on

 private:
  void work();

  const std::unique_ptr<Loop> loop_;
  std::atomic<bool> stop_{false};
  Thread thread_;
};

}  // namespace ppsd
