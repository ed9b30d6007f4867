// A slice of layers on another rank, or on threads of its own, for passes of the loop: see ../decoding/pass.h.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "../decoding/blocks.h"
#include "../decoding/pass.h"
#include "stage.h"

namespace ppsd {

// The taps of an EAGLE-3 head, which are after so many of the model's layers: those of layers [first, last), and those before.
struct StageTaps {
  StageTaps(const std::vector<int>& taps, int first, int last);
  int before() const { return int(theirs.size() - own.size()); }

  std::vector<int> own;       // after so many of these layers
  std::vector<bool> theirs;   // of all up to `last`, in the head's order: is it one of these?
};

class PassStage {
 public:
  using Masks = std::function<std::shared_ptr<TokenMask>(int grammar)>;

  // blocks: as many as this rank has memory for. head: of the last rank, or null. loops: where the blocks are the loop's own.
  // taps: see StageTaps::theirs.
  PassStage(const CpuModel& model, LayerStack* layers, Head* head, Team* team, int blocks, const Blocks* loops = nullptr,
            std::vector<bool> taps = {});

  void use(Masks masks) { masks_ = std::move(masks); }
  // The rows through the layers, in place. verdict: what they choose, of the last rank. reserve: see below. False: cancelled on
  // the way. Throws std::runtime_error for what rank 0 could not have meant.
  using Reserve = std::function<const float*(int rows)>;   // the table of rotations for texts so long
  bool run(Pass* pass, const Cancelled& cancelled, const Reserve& reserve, PassVerdict* verdict);

 private:
  struct Answer {
    int end = 0;
    bool logprobs = false;
    std::shared_ptr<Sampler> sampler;   // of the last rank
  };

  uint8_t* block(int number);
  void change(const Pass& pass);
  Answer& answer(const PassPart& part);
  void add_taps(Pass* pass) const;
  void choose(const Pass& pass, PassVerdict* verdict);

  const CpuModel& model_;
  LayerStack* const layers_;
  Head* const head_;
  Team* const team_;
  const size_t blocks_;
  const Blocks* const loops_;   // or null
  const std::vector<bool> taps_;
  Memory memory_;               // else: of all blocks; comes with the first pass
  std::map<int, Answer> answers_;
  int longest_ = 0;
  Masks masks_;
};

}  // namespace ppsd
