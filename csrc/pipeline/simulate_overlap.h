// What an overlapped schedule would bring, for the planner.
#pragma once

#include "costs.h"

namespace ppsd {

// Tokens per second in simulated time (simulated.h), over as many verification stages as the costs have.
double simulate_overlap(const Schedule& schedule, const StageCosts& costs, double acceptance);

}  // namespace ppsd
