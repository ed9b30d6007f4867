// The lock-step carrier: one thread does all the work in program order, and time is counted in ticks.
//
// A run gives the same rounds every time: by it tests compare the scheduler's text with plain decoding.
#pragma once

#include "carrier.h"

namespace ppsd {

// How long verification takes: `stages` stages that each hold a chunk for `per_stage` ticks of one draft step each.
struct Ticks {
  int stages = 1, per_stage = 1;
};

class LockStep final : public Carrier {
 public:
  LockStep(Stages stages, const Schedule& schedule, const Limits& limits, uint64_t seed, Ticks ticks, bool report_drafts);

  void begin(const std::vector<int>& prompt, int keep) { prompt_ = prompt, keep_ = keep; }
  std::optional<Event> next() override;
  void cancel() override { cancelled_.store(true, std::memory_order_relaxed); }
  const std::vector<int>& tokens() const override { return scheduler_.tokens(); }
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
};

}  // namespace ppsd
