// What the planner of `auto` works with: the seconds of draft steps and of verification passes on this machine.
#pragma once

#include "engine.h"

namespace ppsd {

// Measures for some `seconds` (a few passes of each kind at the least). The engine must have no session.
Costs calibrate(CpuEngine* engine, double seconds);

// Tokens per second of an overlapped schedule in simulated time, for the planner.
double simulate_overlap(const Schedule& schedule, const Costs& costs, double acceptance);

}  // namespace ppsd
