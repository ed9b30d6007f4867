// The loop in a thread of its own.
#pragma once

#include "loop.h"

namespace ppsd {

class LoopThread {
 public:
  explicit LoopThread(std::unique_ptr<Loop> loop);   // throws NoThread
  ~LoopThread();                                     // ends all answers

  Loop& loop() { return *loop_; }
  // Rows of the engine's text for answers to come, see Loop::import_prefix: between two rounds. The engine is not at work meanwhile.
  void import_prefix(CpuEngine& engine);

 private:
  void work();

  const std::unique_ptr<Loop> loop_;
  std::mutex round_;   // held for a round
  std::atomic<bool> stop_{false};
  Thread thread_;
};

}  // namespace ppsd
