#include "session.h"

#include <algorithm>
#include <utility>

namespace ppsd::cuda {

namespace {

// As it may be run: without overlap where that is not wanted.
Schedule allowed(Schedule schedule, bool in_turns) {
  if (in_turns && schedule.overlap) {
    schedule.overlap = false;
    schedule.first_chunk = std::max(schedule.first_chunk, 1);
  }
  return schedule;
}

}  // namespace

GraphSession::GraphSession(std::shared_ptr<Lanes> lanes, Graphs graphs, GraphRequest request, Trace* trace)
    : lanes_(std::move(lanes)),
      request_(std::move(request)),
      carrier_(lanes_.get(), std::move(graphs),
               allowed(request_.policy ? request_.policy->schedule() : request_.schedule, request_.in_turns),
               request_.limits, request_.seed, request_.report_drafts,
               [this](const Round& round, Plan* plan) { committed(round, plan); }, trace, request_.ngrams),
      thread_([this] { work(); }) {}

GraphSession::~GraphSession() { end(); }

void GraphSession::cancel() {
  carrier_.cancel();
  events_.let_go();
}

void GraphSession::end() {
  cancel();
  const std::lock_guard<std::mutex> lock(ending_);
  thread_.join();
}

void GraphSession::work() {
  precise_waits();   // a sleep of 20 us would take 70
  try {
    carrier_.begin(request_.prompt, request_.keep, request_.first);
    while (auto event = carrier_.next()) {
      const Clock::time_point done = Clock::now();
      const double seconds = std::chrono::duration<double>(done - begun_ - waited_).count();
      events_.wait_for_room();
      events_.put(std::move(*event), seconds);
      waited_ += Clock::now() - done;
    }
  } catch (...) {
    events_.finish(std::current_exception());
  }
  events_.finish();
}

void GraphSession::committed(const Round& round, Plan* plan) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_round_).count();
  last_round_ = now;
  AlonePolicy* policy = request_.policy.get();
  if (policy == nullptr || round.prompt || plan->finished()) return;
  // Rounds that were queued before the policy's last decision do not tell what that one is worth.
  const Schedule& decided = plan->schedule();
  const bool drew = std::any_of(round.judged.begin(), round.judged.end(), [](const Draft& draft) { return draft.copied == 0; });
  const bool fits = decided.overlap == plan->overlapping() &&
                    (decided.overlap || (decided.lookahead > 0 ? !round.judged.empty() : !drew));
  if (fits) plan->set_schedule(allowed(policy->after(round, seconds), request_.in_turns));
}

}  // namespace ppsd::cuda
