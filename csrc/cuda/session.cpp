#include "session.h"

#include <algorithm>
#include <utility>

namespace ppsd::cuda {
namespace {

constexpr size_t kAhead = 64;   // events that may wait for the consumer before the work waits for it

}  // namespace

Schedule allowed(Schedule schedule, bool in_turns) {
  if (in_turns && schedule.overlap) {
    schedule.overlap = false;
    schedule.first_chunk = std::max(schedule.first_chunk, 1);
  }
  return schedule;
}

void replan(Planner* planner, const Round& round, double seconds, bool in_turns, Plan* plan) {
  if (round.prompt || plan->finished()) return;
  // Rounds that were queued before the planner's last decision do not tell what that one is worth.
  const Schedule& decided = plan->schedule();
  const bool drew = std::any_of(round.judged.begin(), round.judged.end(), [](const Draft& draft) { return draft.copied == 0; });
  const bool fits = decided.overlap == plan->overlapping() &&
                    (decided.overlap || (decided.lookahead > 0 ? !round.judged.empty() : !drew));
  if (fits) plan->set_schedule(allowed(planner->after(round, seconds), in_turns));
}

GraphSession::GraphSession(std::shared_ptr<Lanes> lanes, Graphs graphs, GraphRequest request, Trace* trace)
    : lanes_(std::move(lanes)),
      request_(std::move(request)),
      carrier_(lanes_.get(), std::move(graphs),
               allowed(request_.planner ? request_.planner->schedule() : request_.schedule, request_.in_turns),
               request_.limits, request_.seed, request_.report_drafts,
               [this](const Round& round, Plan* plan) { return committed(round, plan); }, trace, request_.successors),
      thread_([this] { work(); }) {}

GraphSession::~GraphSession() { end(); }

void GraphSession::cancel() {
  cancelled_.store(true);
  carrier_.cancel();
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void GraphSession::end() {
  cancel();
  const std::lock_guard<std::mutex> lock(ending_);
  thread_.join();
}

GraphSession::Status GraphSession::next(int milliseconds, Event* event, double* seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto ready = [this] { return !events_.empty() || over_; };
  if (!changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), ready)) return Status::kWaiting;
  if (events_.empty()) {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return Status::kEnded;
  }
  *event = std::move(events_.front().first);
  *seconds = events_.front().second;
  events_.pop_front();
  changed_.notify_all();
  return Status::kEvent;
}

void GraphSession::work() {
  precise_waits();   // a sleep of 20 us would take 70
  try {
    carrier_.begin(request_.prompt, request_.keep, request_.first);
    while (auto event = carrier_.next()) {
      const Clock::time_point done = Clock::now();
      const double seconds = std::chrono::duration<double>(done - begun_ - waited_).count();
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return events_.size() < kAhead || cancelled_.load(); });
      events_.emplace_back(std::move(*event), seconds);
      waited_ += Clock::now() - done;
      changed_.notify_all();
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

bool GraphSession::committed(const Round& round, Plan* plan) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_round_).count();
  last_round_ = now;
  if (request_.planner) replan(request_.planner.get(), round, seconds, request_.in_turns, plan);
  return true;
}

}  // namespace ppsd::cuda
