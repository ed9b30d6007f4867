// One answer on a GPU: a thread that queues launches and collects verdicts, and a queue of what has been committed.
#pragma once

#include <memory>
#include <mutex>

#include "../core/event_queue.h"
#include "../loop/policy.h"
#include "../core/thread.h"
#include "carrier.h"

namespace ppsd::cuda {

struct GraphRequest {
  std::vector<int> prompt;
  int keep = 0, first = 0;            // rows of an earlier answer; the token that the prompt gave
  Limits limits;
  Schedule schedule;
  std::shared_ptr<AlonePolicy> policy;   // `auto`: it chooses the schedule, round by round
  OwnedNgrams ngrams;   // what is copied from
  bool in_turns = false;              // no overlap, whatever the schedule says
  uint64_t seed = 0;
  bool report_drafts = false;
};

class GraphSession {
 public:
  // The lanes, the graphs and what they work on must outlive the session; one session at a time uses them.
  GraphSession(std::shared_ptr<Lanes> lanes, Graphs graphs, GraphRequest request, Trace* trace);
  ~GraphSession();   // ends the answer where it is

  using Status = EventQueue::Status;
  Status next(int milliseconds, Event* event, double* seconds) { return events_.next(milliseconds, event, seconds); }
  void cancel();   // from any thread: the answer ends soon
  void end();      // cancels, and returns when nothing runs any more

 private:
  using Clock = std::chrono::steady_clock;

  void work();
  void committed(const Round& round, Plan* plan);

  const std::shared_ptr<Lanes> lanes_;
  const GraphRequest request_;
  GraphCarrier carrier_;
  EventQueue events_;
  const Clock::time_point begun_ = Clock::now();
  Clock::duration waited_{};          // for a consumer that is slower than the work
  Clock::time_point last_round_ = begun_;
  std::mutex ending_;
  Thread thread_;
};

}  // namespace ppsd::cuda
