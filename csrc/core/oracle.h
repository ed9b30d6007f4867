// Drafts that are right by a coin: for benchmarks on real stages, and for simulated time.
#pragma once

#include <vector>

#include "noise.h"
#include "protocol.h"

namespace ppsd {

// For position `position`, whose token is `truth`: right with probability `acceptance`. second: where it is wrong, its
// second choice is right with this probability; 0: there is no second choice. The same seed gives the same mistakes.
inline Draft feigned(int truth, int vocabulary, double acceptance, double second, uint64_t seed, int position) {
  const bool right = coin(seed, position) < acceptance;
  Draft draft{right ? truth : (truth + 1) % vocabulary, acceptance};
  if (second <= 0.0) return draft;
  const bool rescues = !right && coin(~seed, position) < second;
  draft.sibling = rescues ? truth : (truth + 2) % vocabulary;
  draft.sibling_confidence = (1.0 - acceptance) * second;
  return draft;
}

// For benchmarks: what is drafted at position p is `truth[p]` with probability `acceptance`, else another id; second: the
// chance that the second choice is right then. The work of drafting is done all the same.
struct Oracle {
  std::vector<int> truth;
  double acceptance = 1.0, second = 0.0;
  uint64_t seed = 0;

  Draft instead_of(const Draft& draft, int position, int vocabulary) const {   // where it knows the truth
    if (position >= int(truth.size())) return draft;
    return feigned(truth[size_t(position)], vocabulary, acceptance, second, seed, position);
  }
};

}  // namespace ppsd
