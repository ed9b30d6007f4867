// Drafts that are right by a coin: for benchmarks.
#pragma once

#include <vector>

#include "noise.h"
#include "protocol.h"

namespace ppsd {

// What is drafted at position p is `truth[p]` with probability `acceptance`, else another id; the same seed gives the same
// mistakes. The work of drafting is done all the same.
struct Oracle {
  std::vector<int> truth;
  double acceptance = 1.0;
  uint64_t seed = 0;

  Draft instead_of(const Draft& draft, int position, int vocabulary) const {   // where it knows the truth
    if (position >= int(truth.size())) return draft;
    const int right = truth[size_t(position)];
    return {coin(seed, position) < acceptance ? right : (right + 1) % vocabulary, acceptance};
  }
};

}  // namespace ppsd
