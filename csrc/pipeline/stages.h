// What a carrier asks of the stages. The seam for every kind of stage: on the C++ kernels, in Python over
// ranks, and made up for simulations and tests. (Captured CUDA graphs have a plan of their own: csrc/cuda/plan.h.)
//
// A stage keeps the length of its caches to itself: a message whose `start` is below it voids the rows from there on
// (rolling back writes a length), and messages never leave a gap. Siblings are run beside rows of the same message, which
// do not see them, and are kept apart, the newest of each of kSiblingPlaces positions. A later message may say that one was
// `adopted`: then it is a row like others, before those of the message.
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
  // Copy the exit hidden states of the chunk's rows, and of its siblings, into it.
  virtual void export_hidden(Chunk* chunk) = 0;
};

// A slice of layers [E, L). Stages are chained: each turns the chunk's hidden states into the next one's input.
class VerifyStage {
 public:
  virtual ~VerifyStage() = default;
  virtual bool run(Chunk* chunk, const Cancelled& cancelled) = 0;   // false: cancelled on the way
  // The last stage of the chain only: the model's own token after each of the `last` rows of the text at the chunk's end,
  // and then after each of its siblings.
  virtual std::vector<int> choose(const Chunk& chunk, int last) = 0;
  // Of the ids that `choose` gave last; empty: nobody asks for them.
  virtual std::vector<Logprobs> take_logprobs() { return {}; }
};

}  // namespace ppsd
