// The stages of ranks on the C++ kernels; those in Python are in csrc/bindings/ranks.cpp.
#pragma once

#include <memory>
#include <vector>

#include "pass_stage.h"
#include "stage_inbox.h"

namespace ppsd {

// What stages are told of an answer that begins: kWireSettings words, and more for biases and stop ids.
constexpr int kWireSettings = 16;
struct Settings {
  int end = 0;      // positions that the answer may have
  int prompt = 0;   // tokens of its prompt
  int grammar = 0;  // the number of its grammar, which the last rank has been told of; 0: it has none
  Sampling sampling;
};
std::vector<int32_t> words_of(const Settings& settings);
Settings settings_of(const std::vector<int32_t>& words);   // throws std::runtime_error for what means nothing

// Layers [first, last) of a model, as a stage of the loop.
class CpuStation {
 public:
  // delay: see StageInbox. Others: see PassStage.
  CpuStation(std::shared_ptr<const CpuModel> model, int first, int last, std::vector<int> cores, int threads, double delay,
             size_t kv_bytes, const std::vector<int>& taps = {});

  int hidden() const { return model_->shape.hidden_size; }
  int taps() const { return int(passes_.taps().theirs.size()); }   // that rows have when they leave
  StageInbox& inbox() { return inbox_; }
  PassStage& passes() { return passes_; }
  void pin() { team_.pin_caller(); }
  // See PassStage::time. Not while it works.
  double time_pass(int rows, int context) {
    return passes_.time(rows, context, [this](int longest) { return reserve(longest); });
  }

 private:
  const float* reserve(int rows);   // rotations, for the longest text so far

  const std::shared_ptr<const CpuModel> model_;
  Team team_;
  PassStage passes_;
  std::vector<float> rope_;
  int capacity_ = 0;
  StageInbox inbox_;
};

}  // namespace ppsd
