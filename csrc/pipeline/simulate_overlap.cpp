#include "simulate_overlap.h"

#include "simulated.h"
#include "toy_stages.h"

namespace ppsd {

double simulate_overlap(const Schedule& schedule, const StageCosts& costs, double acceptance) {
  constexpr int kTokens = 250;
  const ToyModel model{1};
  ToyDraft draft(model, kTokens + 32, {acceptance}, 2);
  std::deque<ToyVerify> verify;
  Stages stages{&draft, {}};
  for (int stage = 0; stage < costs.stages(); ++stage) stages.verify.push_back(&verify.emplace_back(model, kTokens + 32, stage));
  Limits limits;
  limits.end = kTokens + 2;
  Simulated carrier(std::move(stages), schedule, limits, 0, costs, false);
  carrier.begin({1}, 0);
  while (carrier.next()) {
  }
  return kTokens / carrier.seconds();
}

}  // namespace ppsd
