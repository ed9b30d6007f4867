// `auto` beside a scheduler whose rows may be under way when a verdict lands: in simulated time. Over ranks: decoding/policy.h.
#pragma once

#include <memory>

#include "planner.h"
#include "scheduler.h"

namespace ppsd {

class Replanning {
 public:
  explicit Replanning(std::shared_ptr<Planner> planner) : planner_(std::move(planner)) {}   // null: the schedule stays

  // seconds: since the round before.
  void after(const Round& round, double seconds, Scheduler* scheduler) {
    if (!planner_ || round.prompt || scheduler->finished()) return;
    const bool overlapped = left_over_ || scheduler->schedule().overlap;
    const Schedule& next = planner_->after(round, seconds, left_over_);
    left_over_ = overlapped && !next.overlap && scheduler->in_flight();
    scheduler->set_schedule(next);
  }

 private:
  const std::shared_ptr<Planner> planner_;
  bool left_over_ = false;   // rows that have left before overlapping ended are still under way
};

}  // namespace ppsd
