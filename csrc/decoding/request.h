// What an answer of the loop is to be like.
#pragma once

#include <memory>
#include <vector>

#include "../cpu/stage.h"
#include "../pipeline/planner.h"
#include "../pipeline/successors.h"
#include "../pipeline/trace.h"

namespace ppsd {

struct Request {
  std::vector<int> prompt;
  Sampling sampling;
  Limits limits;
  Schedule schedule;
  std::shared_ptr<Successors> successors;   // of all answers, for schedules that recycle; or null
  std::shared_ptr<Planner> planner;   // `auto`: it chooses the schedule, round by round
  bool report_drafts = false;
  Oracle oracle;
  std::shared_ptr<Trace> trace;   // or null
};

}  // namespace ppsd
