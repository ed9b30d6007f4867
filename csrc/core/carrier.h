// What an answer that is being decoded tells, event by event.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "scheduler.h"
#include "trace.h"

namespace ppsd {

// A draft token was drawn for `position`; a later Round says what became of it.
struct Drafted {
  int position = 0;
  int token = 0;
};

using Event = std::variant<Round, Drafted>;

// In the trace, the moment of an event. A carrier marks every event that it reports, in their order: so times of events are
// found again (ppsd_rt/bench/watch/record.py).
inline void mark(Trace* trace, int verdict_track, const Event& event) {
  if (trace == nullptr) return;
  if (const auto* round = std::get_if<Round>(&event)) {
    const bool rejected = round->accepted < int(round->judged.size());
    trace->mark(rejected ? "roll back" : "commit", verdict_track, int(round->committed.size()));
  } else {
    trace->mark("drafted", kDraftTrack, 1);
  }
}

// The drafts that were copied for a step.
inline std::vector<Drafted> copied_for(const DraftStep& step) {
  std::vector<Drafted> copies;
  const int rows = int(step.ids.size());
  for (int row = rows - step.copied; row < rows; ++row) copies.push_back({step.start + row, step.ids[row]});
  return copies;
}

}  // namespace ppsd
