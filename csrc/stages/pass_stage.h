// A slice of layers on another rank, or on threads of its own, for passes of the loop: see pass.h.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "../cpu/checkpoint.h"
#include "../cpu/team.h"
#include "../loop/blocks.h"
#include "pass.h"
#include "stage_inbox.h"

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

  // Layers [first, last), and the LM head after the last of them. kv_bytes: for blocks; or loops: where the blocks are the
  // loop's own, of which these layers' bytes begin at `begin`. taps: of an EAGLE-3 head, see StageTaps.
  PassStage(const CpuModel& model, int first, int last, Team* team, size_t kv_bytes, const Blocks* loops = nullptr, size_t begin = 0,
            const std::vector<int>& taps = {});

  int blocks() const { return blocks_; }   // that answers may have here
  size_t end() const { return layers_.end(); }   // of these layers' bytes in a block
  bool last() const { return head_ != nullptr; }
  const StageTaps& taps() const { return taps_; }
  void use(Masks masks) { masks_ = std::move(masks); }
  // The rows through the layers, in place. verdict: what they choose, of the last rank. rope: the loop's table of rotations; or
  // null: the stage has its own. False: cancelled on the way. Throws std::runtime_error for what rank 0 could not have meant.
  bool run(PassMessage* pass, const Cancelled& cancelled, PassVerdict* verdict, const float* rope = nullptr);
  // Seconds of a pass over so many made-up rows after `context` others, the choice of tokens included.
  double time(int rows, int context);

 private:
  struct Answer {
    int end = 0;
    bool logprobs = false;
    std::shared_ptr<Sampler> sampler;   // of the last rank
  };

  uint8_t* block(int number);
  const float* reserve(int rows);   // rotations, for the longest text so far
  void change(const PassMessage& pass);
  Answer& answer(const PassPart& part);
  void add_taps(PassMessage* pass) const;
  void choose(const PassMessage& pass, PassVerdict* verdict);

  const CpuModel& model_;
  Team* const team_;
  LayerStack layers_;
  std::unique_ptr<Head> head_;  // of the last stage; or null
  const Blocks* const loops_;   // or null
  const int blocks_;
  const StageTaps taps_;
  Memory memory_;               // else: of all blocks; comes with the first pass
  std::map<int, Answer> answers_;
  int longest_ = 0, capacity_ = 0;
  std::vector<float> rope_;
  std::unique_ptr<TextBlocks> timed_;
  Masks masks_;
};

// Layers [first, last) of a model on another rank, with a team of its own.
class CpuStation {
 public:
  CpuStation(std::shared_ptr<const CpuModel> model, int first, int last, std::vector<int> cores, int threads, size_t kv_bytes,
             const std::vector<int>& taps = {})   // see PassStage
      : model_(std::move(model)),
        team_(threads, std::move(cores)),
        passes_(*model_, first, last, &team_, kv_bytes, nullptr, 0, taps),
        inbox_([this](PassMessage* pass, const Cancelled& cancelled, PassVerdict* verdict) { return passes_.run(pass, cancelled, verdict); },
               model_->shape.hidden_size, passes_.last(), passes_.taps().before()) {}

  int hidden() const { return model_->shape.hidden_size; }
  int taps() const { return int(passes_.taps().theirs.size()); }   // that rows have when they leave
  StageInbox& inbox() { return inbox_; }
  PassStage& passes() { return passes_; }   // while it does not work
  void pin() { team_.pin_caller(); }

 private:
  const std::shared_ptr<const CpuModel> model_;
  Team team_;
  PassStage passes_;
  StageInbox inbox_;
};

}  // namespace ppsd
