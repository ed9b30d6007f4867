// What the planner of `auto` works with: the seconds of draft steps and of verification passes on this machine.
#pragma once

#include <memory>

#include "../core/costs.h"
#include "blocks.h"
#include "cpu_passes.h"

namespace ppsd {

// A made-up text, whose steps and passes are timed.
class TimedText {
 public:
  TimedText(std::shared_ptr<const CpuModel> model, std::unique_ptr<Team> team, bool late = true);   // late: see CpuPasses

  Team& team() { return passes_.team(); }
  size_t block_bytes() const { return passes_.block_bytes(); }   // see ModelBackend
  // Seconds of a row through the early layers after `context` others; draw: and of a draft token after it.
  double step(bool draw, int context);
  // Seconds of a pass over so many rows after `context` others, and of their choice of tokens.
  double verify(int rows, int context);

 private:
  void reserve(int rows);
  void follow(int context);

  CpuPasses passes_;
  std::unique_ptr<TextBlocks> blocks_;
  Sampler sampler_;
  DraftVocabulary vocabulary_;
  EagleText eagle_;
  Feedback feedback_;                // heads of this kind pay for it
  std::vector<float> states_, x_;    // [kPassRows][hidden]
  int followed_ = -1, verified_ = 0; // of an EAGLE-3 head: the context that it has read, and rows since the last draft
};

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
  virtual void part() {}                               // from now on each stage has threads of its own
  virtual void work_on(int stage) = 0;                 // by the thread that computes it: 0 drafts, 1 verifies
};

// Measures for as long as Tuning says (a few passes of each kind at the least). threads: of the bench. overlap: side by
// side too. step_share: the layers of a draft step over those of a pass. Throws std::invalid_argument for what cannot be.
Costs calibrate(Bench* bench, int threads, bool overlap, double step_share);
Costs calibrate(const std::shared_ptr<const CpuModel>& model, int threads, bool overlaps);   // overlaps: with one verification stage

}  // namespace ppsd
