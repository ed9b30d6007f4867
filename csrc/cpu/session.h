// One answer: a thread that works, and a queue of what it has committed.
#pragma once

#include <chrono>

#include "engine.h"

namespace ppsd {

class Session {
 public:
  // The engine must outlive the session, and has one session at a time. Throws NoThread.
  Session(CpuEngine* engine, Request request, Trace* trace);
  ~Session();   // ends the answer where it is

  enum class Status { kEvent, kEnded, kWaiting };
  // The next event, waiting for at most `milliseconds`. Rethrows what went wrong in a stage.
  // seconds: of work, from the beginning to this event; what the consumer does meanwhile neither counts nor helps.
  Status next(int milliseconds, Event* event, double* seconds);
  // Whether there is something for `next`, waiting for at most `milliseconds`.
  bool ready(int milliseconds);
  // Of the prompt: {rows that have passed the layers, rows that have to}, without those that an earlier answer left.
  std::pair<int, int> prompt_rows() const;
  void cancel();   // from any thread: the answer ends soon
  void end();      // cancels, and returns when nothing runs any more; the engine is free for another session then
  std::vector<int> text();   // the prompt, and what the events commit, those that nobody has asked for yet included
  double seconds();          // of work, as of the last of these events

 private:
  bool wait(std::unique_lock<std::mutex>* lock, int milliseconds);
  void work();
  bool play(const Schedule& schedule, std::vector<int>* tokens, bool first);
  bool replan(const Round& round, Scheduler* scheduler);

  using Clock = std::chrono::steady_clock;
  struct Stamped {
    Event event;
    double seconds;
  };

  CpuEngine* engine_;
  const Request request_;
  Trace* trace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Stamped> events_;
  std::vector<int> text_;
  double seconds_ = 0;         // of the last event
  const Clock::time_point begun_ = Clock::now();
  Clock::time_point woken_{};  // when the consumer was, last
  Clock::duration waited_{};   // for a consumer that is slower than the work
  Carrier* carrier_ = nullptr;
  bool over_ = false;
  std::atomic<bool> cancelled_{false};
  std::atomic<int> kept_{-1};   // rows of the prompt that an earlier answer left; -1: not begun
  std::exception_ptr failure_;
  Clock::time_point committed_;          // when the last round was
  bool switching_ = false;               // the planner wants another carrier
  int held_ = 0;                         // of the committed text, rows that every stage holds
  std::mutex ending_;
  Thread thread_;
};

}  // namespace ppsd
