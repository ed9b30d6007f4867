// Drafts that are right by a coin: for benchmarks on real stages, and for simulated time.
#pragma once

#include <vector>

#include "noise.h"
#include "protocol.h"

namespace ppsd {

// For position `position`, whose token is `truth`: right with probability `acceptance`. The same seed gives the same mistakes.
inline Draft feigned(int truth, int vocabulary, double acceptance, uint64_t seed, int position) {
  const bool right = coin(seed, position) < acceptance;
  return {right ? truth : (truth + 1) % vocabulary, acceptance};
}

// For benchmarks: what is drafted at position p is `truth[p]` with probability `acceptance`, else another id. The work of
// drafting is done all the same.
struct Oracle {
  std::vector<int> truth;
  double acceptance = 1.0;
  uint64_t seed = 0;

  Draft instead_of(const Draft& draft, int position, int vocabulary) const {   // where it knows the truth
    if (position >= int(truth.size())) return draft;
    return feigned(truth[size_t(position)], vocabulary, acceptance, seed, position);
  }
};

}  // namespace ppsd
