// The policy of answers that are alone, one after the other, where whole rounds are timed and not their passes: on a GPU, whose
// launches are queued ahead.
#pragma once

#include "policy.h"

namespace ppsd {

class AlonePolicy {
 public:
  // prior: how often drafts are right, as far as is known. overlaps: stages can.
  AlonePolicy(double prior, bool overlaps);

  // Before an answer. asked: of it `lookup` and `recycle` count. pool: see Drafting.
  void begin(const Schedule& asked, int pool);
  // After every round but the prompt's; seconds: since the round before. What to do next.
  const Schedule& after(const Round& round, double seconds);
  const Schedule& schedule() const { return schedule_; }
  std::string explain() const { return policy_.explain(); }

 private:
  void plan();

  Policy policy_;
  Drafting drafting_;
  Schedule schedule_;
  std::chrono::steady_clock::time_point now_{std::chrono::seconds(1)};   // of rounds alone
};

}  // namespace ppsd
