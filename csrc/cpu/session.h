// One answer: a thread that works, and a queue of what it has committed.
#pragma once

#include "engine.h"

namespace ppsd {

class Session {
 public:
  // The engine must outlive the session, and has one session at a time.
  Session(CpuEngine* engine, Request request, Trace* trace);
  ~Session();   // ends the answer where it is

  enum class Status { kEvent, kEnded, kWaiting };
  // The next event, waiting for at most `milliseconds`. Rethrows what went wrong in a stage.
  Status next(int milliseconds, Event* event);
  void cancel();
  void end();   // cancels, and returns when nothing runs any more; the engine is free for another session then

 private:
  void work();
  void play(const Schedule& schedule, std::vector<int>* tokens, bool first);
  bool ended(const std::vector<int>& tokens) const;

  CpuEngine* engine_;
  const Request request_;
  Trace* trace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
  Carrier* carrier_ = nullptr;
  bool over_ = false;
  std::atomic<bool> cancelled_{false};
  std::exception_ptr failure_;
  std::mutex ending_;
  std::thread thread_;
};

}  // namespace ppsd
