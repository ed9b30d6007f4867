// Which draft costs no draft step: a copy from the text so far, or what usually follows. Whoever decides it asks here.
#pragma once

#include <optional>

#include "lookup.h"
#include "schedule.h"
#include "successors.h"

namespace ppsd {

// What stands at position `known` next, if the schedule copies and the exit head would not do better. successors: where
// the schedule recycles. stopped: the stop rule has ended drafting.
inline std::optional<Draft> next_copy(const Schedule& schedule, const Controller& controller, const Lookup& lookup,
                                      const Successors* successors, const Lookup::TokenAt& at, int known, bool stopped) {
  auto copy = schedule.lookup > 0 ? lookup.propose(at, known) : std::nullopt;
  const auto usual = schedule.recycle ? successors->propose(at, known) : std::nullopt;
  if (usual && (!copy || usual->confidence > copy->confidence)) copy = usual;
  if (!copy || !controller.may_copy(copy->confidence, stopped)) return std::nullopt;
  const bool head_is_better = schedule.lookahead > 0 && !lookup.beats_head(copy->confidence);
  return head_is_better ? std::nullopt : copy;
}

}  // namespace ppsd
