// What the planner of `auto` works with: the seconds of draft steps and of verification passes on this machine.
#pragma once

#include "../pipeline/costs.h"
#include "engine.h"

namespace ppsd {

// What a calibration times, and the clock that it ends by: stages after a text of StageCosts::kContext rows. Tests make one up.
class Bench {
 public:
  virtual ~Bench() = default;
  virtual double now() = 0;                            // seconds since some moment
  // Seconds that these take, for the same place in the text each time:
  virtual double draft(bool draw) = 0;                 // a row through the early layers; draw: and a draft token
  // A pass over so many rows, up to RowTable::kMost, after `context` rows, and its choice of tokens.
  virtual double verify(int rows, int context) = 0;
  virtual bool short_handed() = 0;                     // fewer threads work than should: others have the cores
  virtual void lengthen() {}                           // from now on `context` may be greater
  virtual void part() {}                               // from now on each stage has threads of its own
  virtual void work_on(int stage) = 0;                 // by the thread that computes it: 0 drafts, 1 verifies
};

// Measures for as long as Tuning says (a few passes of each kind at the least). threads: of the bench. overlap: side by
// side too. step_share: the layers of a draft step over those of a pass. Throws std::invalid_argument for what cannot be.
Costs calibrate(Bench* bench, int threads, bool overlap, double step_share);
Costs calibrate(CpuEngine* engine, bool overlaps = true);   // overlaps: with one verification stage

}  // namespace ppsd
