// What the planner of `auto` works with: the seconds of draft steps and of verification passes on this machine.
#pragma once

#include "engine.h"

namespace ppsd {

// What a calibration times, and the clock that it ends by: stages after a text of Costs::kContext rows. Tests make one up.
class Bench {
 public:
  virtual ~Bench() = default;
  virtual double now() = 0;                            // seconds since some moment
  // Seconds that these take, for the same place in the text each time:
  virtual double draft(bool draw) = 0;                 // a row through the early layers; draw: and a draft token
  virtual double verify(int rows, int context) = 0;    // a pass over so many rows after `context` rows, and its choice of tokens
  virtual bool short_handed() = 0;                     // fewer threads work than should: others have the cores
  virtual void lengthen() {}                           // from now on `context` may be greater
  virtual void part() {}                               // from now on each stage has threads of its own
  virtual void work_on(int stage) = 0;                 // by the thread that computes it: 0 drafts, 1 verifies
};

// Measures for some `seconds` (a few passes of each kind at the least). threads: of the bench. overlap: side by side too.
// step_share: the layers of a draft step over those of a pass.
Costs calibrate(Bench* bench, int threads, bool overlap, double step_share, double seconds);
Costs calibrate(CpuEngine* engine, double seconds);   // the engine must have no session

// Throws std::invalid_argument for costs that no planner may work with: not finite, 0 where that cannot be, absurdly small
// or great, or more rows for less. (ppsd_rt/seconds.py says the same in Python.)
void check(const Costs& costs);

// Tokens per second of an overlapped schedule in simulated time, for the planner.
double simulate_overlap(const Schedule& schedule, const Costs& costs, double acceptance);

}  // namespace ppsd
