// The lock-step carrier: one thread does all the work in program order, and time is counted in ticks.
//
// A run gives the same rounds every time: by it tests compare the scheduler's text with plain decoding.
#pragma once

#include <algorithm>
#include <atomic>

#include "../pipeline/carrier.h"

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

inline LockStep::LockStep(Stages stages, const Schedule& schedule, const Limits& limits, uint64_t seed, Ticks ticks,
                   bool report_drafts)
    : stages_(std::move(stages)),
      scheduler_(schedule, limits, seed),
      ticks_(ticks),
      report_drafts_(report_drafts) {}

inline std::optional<Event> LockStep::next() {
  if (!started_) prefill();
  while (events_.empty() && !scheduler_.finished()) {
    if (cancelled()) scheduler_.cancel();
    else advance();
  }
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

inline void LockStep::prefill() {
  started_ = true;
  std::vector<float> last;
  const int first = run_prompt(stages_, prompt_, keep_, [this] { return cancelled(); }, &last);
  if (first < 0) return scheduler_.cancel();
  events_.emplace_back(scheduler_.begin(prompt_, keep_, first, std::move(last), stages_.verify.back()->take_logprobs()));
}

// One tick: commit what lands, hand over what is ready, draft.
inline void LockStep::advance() {
  ++tick_;
  if (!flights_.empty() && flights_.front().lands <= tick_) {
    const Verdict verdict = std::move(flights_.front().verdict);
    flights_.pop_front();
    if (auto round = scheduler_.land(verdict)) {
      if (scheduler_.epoch() != round->epoch) {   // rolled back: what is still under way is void
        const auto is_void = [this](const Flight& flight) { return scheduler_.is_void(flight.verdict); };
        flights_.erase(std::remove_if(flights_.begin(), flights_.end(), is_void), flights_.end());
        stage_free_at_ = tick_;
      }
      events_.emplace_back(std::move(*round));
    }
  }
  if (tick_ >= stage_free_at_ && scheduler_.ready()) launch();
  if (scheduler_.may_step()) step();
}

inline void LockStep::launch() {
  Chunk chunk = scheduler_.launch();
  stages_.draft->export_hidden(&chunk);
  for (VerifyStage* stage : stages_.verify)
    if (!stage->run(&chunk, [this] { return cancelled(); })) return scheduler_.cancel();
  std::vector<int> true_ids = stages_.verify.back()->choose(chunk, chunk.rows());
  Verdict verdict{chunk.epoch, chunk.start, std::move(true_ids), std::move(chunk.hidden), std::move(chunk.siblings),
                  stages_.verify.back()->take_logprobs()};
  flights_.push_back({std::move(verdict), tick_ + int64_t(ticks_.stages) * ticks_.per_stage});
  stage_free_at_ = tick_ + ticks_.per_stage;
}

inline void LockStep::step() {
  const DraftStep step = scheduler_.next_step();
  if (report_drafts_)
    for (const Drafted& copy : copied_for(step)) events_.emplace_back(copy);
  Draft draft;
  if (!stages_.draft->step(step, step.draw ? &draft : nullptr, [this] { return cancelled(); }))
    return scheduler_.cancel();
  const int position = step.start + int(step.ids.size());
  scheduler_.stepped(step, step.draw ? &draft : nullptr);
  if (step.draw && report_drafts_) events_.emplace_back(Drafted{position, draft.token});
}

}  // namespace ppsd
