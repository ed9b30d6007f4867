#include "alone.h"

#include <algorithm>

namespace ppsd {
namespace {

// Of a pass's weights, those that a draft reads: until one has been measured.
constexpr double kDraftShare = 0.3;

}  // namespace

AlonePolicy::AlonePolicy(double prior, bool overlaps)
    : policy_(true, kDraftShare, prior, overlaps ? Policy::Stages::kThreads : Policy::Stages::kNone) {}

void AlonePolicy::begin(const Schedule& asked, int pool) {
  drafting_ = {};
  drafting_.automatic = true;
  drafting_.asked = asked;
  drafting_.pool = pool;
  plan();
}

// The rows of the round are its pass; what that does not explain, its draft steps took.
const Schedule& AlonePolicy::after(const Round& round, double seconds) {
  const int drawn = std::max(int(round.judged.size()) + round.dropped - round.copied, 0);
  if (!schedule_.overlap) {
    const double pass = policy_.times.late.known() ? std::min(policy_.times.late(round.rows), seconds) : seconds;
    if (drawn == 0) {
      policy_.took(&PassTimes::late, round.rows, seconds);
    } else {
      policy_.took(&PassTimes::late, round.rows, pass);
      policy_.took_steps(drawn, std::max(seconds - pass, 1e-9));
    }
  }
  now_ += std::chrono::nanoseconds(int64_t(1e9 * seconds));
  policy_.learn(&drafting_, round, false, now_);
  plan();
  return schedule_;
}

void AlonePolicy::plan() {
  std::vector<Policy::Writer> writers{{&drafting_, {}}};
  policy_.plan(&writers, {0, 0, kMaxChunk, true, drafting_.overlaps});
  schedule_ = writers.front().schedule;
}

}  // namespace ppsd
