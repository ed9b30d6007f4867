// The lock-step carrier: one thread does all the work in program order, and time is counted in ticks.
//
// A run gives the same rounds every time, those of ppsd_rt/reference/pipeline.py, of which this is the twin. It is also
// how schedules without overlap run on a CPU: then the ticks do not matter, and every stage has all the cores.
#pragma once

#include "carrier.h"

namespace ppsd {

// How long verification takes: `stages` stages that each hold a chunk for `per_stage` ticks of one draft step each.
struct Ticks {
  int stages = 1, per_stage = 1;
};

class LockStep final : public Carrier {
 public:
  LockStep(Stages stages, const Schedule& schedule, const Limits& limits, uint64_t seed, Ticks ticks, bool report_drafts,
           AfterRound after_round = nullptr, Trace* trace = nullptr);

  void begin(const std::vector<int>& prompt, int keep) { prompt_ = prompt, keep_ = keep; }
  void recycle(std::shared_ptr<Successors> successors) { scheduler_.recycle(std::move(successors)); }
  std::optional<Event> next() override;
  void cancel() override { cancelled_.store(true, std::memory_order_relaxed); }
  const std::vector<int>& tokens() const override { return scheduler_.tokens(); }
  int rows() const override { return scheduler_.rows(); }
  int64_t tick() const { return tick_; }

 private:
  struct Flight {
    Verdict verdict;
    int64_t lands;
  };

  void prefill();
  void advance();
  void launch();
  void step();
  void report(Event event);
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

  Stages stages_;
  Scheduler scheduler_;
  Ticks ticks_;
  bool report_drafts_;
  std::vector<int> prompt_;
  int keep_ = 0;
  bool started_ = false;
  std::deque<Flight> flights_;
  std::deque<Event> events_;
  int64_t tick_ = 0, stage_free_at_ = 0;
  std::atomic<bool> cancelled_{false};
  const AfterRound after_round_;
  Trace* const trace_;
};

}  // namespace ppsd
