// The threads carrier: every stage has a thread of its own, so that drafting and verifying overlap in time.
//
// The scheduler is the meeting point, behind one mutex that is held for microseconds; the stages compute outside of it.
// A verdict that rolls back raises the epoch, which stages look at between layers: void work ends there.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

#include "carrier.h"
#include "thread.h"

namespace ppsd {

class Threads final : public Carrier {
 public:
  // on_start: what a stage's thread does first (0: the draft stage, s: verification stage s), such as pinning itself.
  Threads(Stages stages, const Schedule& schedule, const Limits& limits, uint64_t seed, bool report_drafts,
          std::function<void(int)> on_start, AfterRound after_round = nullptr, Trace* trace = nullptr);
  ~Threads() override;

  void begin(const std::vector<int>& prompt, int keep);   // throws NoThread; the stages are free then
  void recycle(std::shared_ptr<Successors> successors) { scheduler_.recycle(std::move(successors)); }
  std::optional<Event> next() override;
  void cancel() override;
  const std::vector<int>& tokens() const override { return scheduler_.tokens(); }
  int rows() const override { return scheduler_.rows(); }

 private:
  void draft_loop();
  void verify_loop(int stage);
  void run_stage(int stage, const std::function<void()>& loop);
  void stop_locked();
  void wake_all();
  void report(Event event);
  bool over() const { return stop_ || scheduler_.finished(); }

  struct Message {
    Chunk chunk;
    bool prompt = false;
  };

  Stages stages_;
  Scheduler scheduler_;
  const bool report_drafts_;
  const std::function<void(int)> on_start_;
  const AfterRound after_round_;
  Trace* const trace_;

  std::mutex mutex_;
  std::vector<std::condition_variable> wake_;   // of each stage's thread: what it waits for may have come
  std::condition_variable happened_;         // an event for the consumer, or the end
  std::vector<std::deque<Message>> inbox_;   // of each verification stage but, after the prompt, the first
  std::deque<Event> events_;
  std::vector<int> prompt_;
  int keep_ = 0;
  bool begun_ = false;                       // the prompt has passed
  std::atomic<bool> stop_{false};
  std::exception_ptr failure_;
  std::vector<Thread> threads_;
};

}  // namespace ppsd
