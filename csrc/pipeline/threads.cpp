#include "threads.h"

namespace ppsd {

Threads::Threads(Stages stages, const Schedule& schedule, const Limits& limits, uint64_t seed, bool report_drafts,
                 std::function<void(int)> on_start, AfterRound after_round, Trace* trace)
    : stages_(std::move(stages)),
      scheduler_(schedule, limits, seed),
      report_drafts_(report_drafts),
      on_start_(std::move(on_start)),
      after_round_(std::move(after_round)),
      trace_(trace),
      wake_(1 + stages_.verify.size()),
      inbox_(stages_.verify.size()) {}

Threads::~Threads() {
  cancel();
  threads_.clear();
}

void Threads::begin(const std::vector<int>& prompt, int keep) {
  prompt_ = prompt;
  keep_ = keep;
  threads_.emplace_back([this] { run_stage(0, [this] { draft_loop(); }); });
  for (int stage = 0; stage < int(stages_.verify.size()); ++stage)
    threads_.emplace_back([this, stage] { run_stage(stage + 1, [this, stage] { verify_loop(stage); }); });
}

std::optional<Event> Threads::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  happened_.wait(lock, [this] { return !events_.empty() || over(); });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void Threads::cancel() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_locked();
}

void Threads::stop_locked() {
  stop_.store(true, std::memory_order_relaxed);
  if (!scheduler_.finished()) scheduler_.cancel();
  wake_all();
}

void Threads::wake_all() {
  for (std::condition_variable& stage : wake_) stage.notify_one();
  happened_.notify_all();
}

void Threads::report(Event event) {
  mark(trace_, kVerifyTrack + int(stages_.verify.size()) - 1, event);
  events_.emplace_back(std::move(event));
  happened_.notify_one();
}

void Threads::run_stage(int stage, const std::function<void()>& loop) {
  try {
    if (on_start_) on_start_(stage);
    loop();
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    stop_locked();
  }
}

// The draft stage: the prompt, then one step after the other while the scheduler allows.
void Threads::draft_loop() {
  {
    TraceScope scope(trace_, kDraftTrack, "prompt", int(prompt_.size()) - keep_);
    DraftStep step;
    step.start = keep_;
    step.ids.assign(prompt_.begin() + keep_, prompt_.end());
    if (!stages_.draft->step(step, nullptr, [this] { return stop_.load(std::memory_order_relaxed); })) return;
    Message message;
    message.chunk.start = keep_;
    message.chunk.ids = step.ids;
    message.prompt = true;
    stages_.draft->export_hidden(&message.chunk);
    const std::lock_guard<std::mutex> lock(mutex_);
    inbox_[0].push_back(std::move(message));
    wake_[1].notify_one();
  }
  for (;;) {
    DraftStep step;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      TraceScope scope(trace_, kDraftTrack, "wait", 0);
      wake_[0].wait(lock, [this] { return over() || (begun_ && scheduler_.may_step()); });
      if (over()) return;
      step = scheduler_.next_step();
      if (report_drafts_)
        for (const Drafted& copy : copied_for(step)) report(copy);
    }
    Draft draft;
    TraceScope scope(trace_, kDraftTrack, "draft", int(step.ids.size()));
    const auto cancelled = [&] { return scheduler_.epoch() != step.epoch || stop_.load(std::memory_order_relaxed); };
    const bool done = stages_.draft->step(step, step.draw ? &draft : nullptr, cancelled);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done || !scheduler_.stepped(step, step.draw ? &draft : nullptr)) {
      scope.rename("dropped draft");
      continue;
    }
    if (step.draw && report_drafts_) report(Drafted{step.start + int(step.ids.size()), draft.token});
    wake_[1].notify_one();
  }
}

void Threads::verify_loop(int stage) {
  const int track = kVerifyTrack + stage;
  for (;;) {
    Message message;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      TraceScope scope(trace_, track, "wait", 0);
      const auto ready = [&] { return !inbox_[stage].empty() || (stage == 0 && begun_ && scheduler_.ready()); };
      wake_[1 + stage].wait(lock, [&] { return over() || ready(); });
      if (over()) return;
      if (!inbox_[stage].empty()) {
        message = std::move(inbox_[stage].front());
        inbox_[stage].pop_front();
      } else {
        message.chunk = scheduler_.launch();
        stages_.draft->export_hidden(&message.chunk);
      }
    }
    Chunk& chunk = message.chunk;
    TraceScope scope(trace_, track, message.prompt ? "prompt" : "verify", chunk.all_rows());
    const auto cancelled = [&] { return scheduler_.is_void(chunk) || stop_.load(std::memory_order_relaxed); };
    if (cancelled() || !stages_.verify[stage]->run(&chunk, cancelled)) {
      scope.rename("dropped verify");
      continue;
    }
    if (stage + 1 < int(stages_.verify.size())) {
      const std::lock_guard<std::mutex> lock(mutex_);
      inbox_[stage + 1].push_back(std::move(message));
      wake_[1 + stage + 1].notify_one();
      continue;
    }
    std::vector<int> true_ids = stages_.verify[stage]->choose(chunk, message.prompt ? 1 : chunk.rows());
    Verdict verdict{chunk.epoch, chunk.start, std::move(true_ids), {}, chunk.siblings,
                    stages_.verify[stage]->take_logprobs()};
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) return;
    std::optional<Round> round;
    if (message.prompt) {
      round = scheduler_.begin(prompt_, keep_, verdict.true_ids.front(), last_row(chunk), std::move(verdict.logprobs));
      begun_ = true;
    } else {
      verdict.hidden = std::move(chunk.hidden);
      round = scheduler_.land(verdict);
    }
    if (round) {
      const bool go_on = !after_round_ || after_round_(*round, &scheduler_);
      report(std::move(*round));
      if (!go_on) stop_locked();
    } else {
      scope.rename("dropped verify");
    }
    if (over()) return wake_all();
    wake_[0].notify_one();
    wake_[1].notify_one();
  }
}

}  // namespace ppsd
