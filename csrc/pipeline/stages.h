// What a carrier asks of the stages. The seam for every kind of stage: C++ on a CPU, simulated, later captured CUDA
// graphs and ranks.
//
// A stage keeps the length of its caches to itself: a message whose `start` is below it voids the rows from there on
// (rolling back writes a length), and messages never leave a gap.
#pragma once

#include <functional>

#include "protocol.h"

namespace ppsd {

// True when the work at hand has become void; stages ask at layer boundaries.
using Cancelled = std::function<bool()>;

// Layers [0, E) and the exit head.
class DraftStage {
 public:
  virtual ~DraftStage() = default;
  // Run the step's rows; then, if it says so, draw a draft token into `draft`. False: cancelled on the way.
  virtual bool step(const DraftStep& step, Draft* draft, const Cancelled& cancelled) = 0;
  // Copy the exit hidden states of the chunk's rows into it.
  virtual void export_hidden(Chunk* chunk) = 0;
};

// A slice of layers [E, L). Stages are chained: each turns the chunk's hidden states into the next one's input.
class VerifyStage {
 public:
  virtual ~VerifyStage() = default;
  virtual bool run(Chunk* chunk, const Cancelled& cancelled) = 0;   // false: cancelled on the way
  // The last stage of the chain only: the model's own token after each of the `last` rows at the chunk's end.
  virtual std::vector<int> choose(const Chunk& chunk, int last) = 0;
};

}  // namespace ppsd
