// One answer: a thread that works, and a queue of what it has committed.
#pragma once

#include <chrono>

#include "../pipeline/event_queue.h"
#include "engine.h"

namespace ppsd {

class Session {
 public:
  // The engine must outlive the session, and has one session at a time. Throws NoThread.
  Session(CpuEngine* engine, Request request, Trace* trace);
  ~Session();   // ends the answer where it is

  using Status = EventQueue::Status;
  // seconds: what the consumer does meanwhile neither counts nor helps.
  Status next(int milliseconds, Event* event, double* seconds) { return events_.next(milliseconds, event, seconds); }
  bool ready(int milliseconds) { return events_.ready(milliseconds); }
  // Of the prompt: {rows that have passed the layers, rows that have to}, without those that an earlier answer left.
  std::pair<int, int> prompt_rows() const;
  void cancel();   // from any thread: the answer ends soon
  void end();      // cancels, and returns when nothing runs any more; the engine is free for another session then
  std::vector<int> text();   // the prompt, and what the events commit, those that nobody has asked for yet included
  double seconds();          // of work, as of the last of these events

 private:
  void work();
  bool play(const Schedule& schedule, std::vector<int>* tokens, bool first);
  bool replan(const Round& round, Scheduler* scheduler);

  using Clock = std::chrono::steady_clock;
  CpuEngine* engine_;
  const Request request_;
  Trace* trace_;
  std::mutex mutex_;
  EventQueue events_;
  std::vector<int> text_;
  double seconds_ = 0;         // of the last event
  const Clock::time_point begun_ = Clock::now();
  Clock::duration waited_{};   // for a consumer that is slower than the work
  Carrier* carrier_ = nullptr;
  std::atomic<bool> cancelled_{false};
  std::atomic<int> kept_{-1};   // rows of the prompt that an earlier answer left; -1: not begun
  Clock::time_point committed_;          // when the last round was
  bool switching_ = false;               // the planner wants another carrier
  int held_ = 0;                         // of the committed text, rows that every stage holds
  std::mutex ending_;
  Thread thread_;
};

}  // namespace ppsd
