#include "simulate_overlap.h"

#include "simulated.h"
#include "toy_stages.h"

namespace ppsd {

double simulate_overlap(const Schedule& schedule, const StageCosts& costs, double acceptance) {
  // Rounds wait for this, so it is short. Of 3000 seeds the one whose mistakes are the most usual: with 2 to 12 stages and
  // acceptances of 0.1 to 0.9 the speed is within 3 % of that of 4000 tokens (docs/history/ranks.md).
  constexpr int kTokens = 96, kSeed = 436;
  const ToyModel model{1};
  ToyDraft draft(model, kTokens + 32, {acceptance}, kSeed);
  std::deque<ToyVerify> verify;
  Stages stages{&draft, {}};
  for (int stage = 0; stage < costs.stages(); ++stage) stages.verify.push_back(&verify.emplace_back(model, kTokens + 32, stage));
  Limits limits;
  limits.end = kTokens + 2;
  Simulated carrier(std::move(stages), schedule, limits, 0, costs);
  carrier.begin({1}, 0);
  while (carrier.next()) {
  }
  return kTokens / carrier.seconds();
}

}  // namespace ppsd
