// What an answer of the loop is to be like.
#pragma once

#include <memory>
#include <vector>

#include "../cpu/sampler.h"
#include "../pipeline/oracle.h"
#include "../pipeline/planner.h"
#include "../pipeline/ngrams.h"
#include "../pipeline/trace.h"

namespace ppsd {

struct Request {
  std::vector<int> prompt;
  Sampling sampling;
  Limits limits;
  Schedule schedule;
  OwnedNgrams ngrams;             // what is copied from
  std::shared_ptr<Planner> planner;   // `auto`: it chooses the schedule, round by round
  bool report_drafts = false;
  Oracle oracle;
  std::shared_ptr<Trace> trace;   // or null
};

}  // namespace ppsd
