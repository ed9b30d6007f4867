// The stages of ranks on the C++ kernels; those in Python are in csrc/bindings/ranks.cpp.
#pragma once

#include <memory>
#include <vector>

#include "../decoding/pass_station.h"
#include "pass_stage.h"
#include "stage.h"

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

// The rotary table of a stage, as long as the longest answer so far.
class Rope {
 public:
  explicit Rope(const CpuModel& model) : rotary_(model.rotary) {}
  const float* reserve(int capacity);
  int capacity() const { return capacity_; }

 private:
  const Rotary& rotary_;
  std::vector<float> rope_;
  int capacity_ = 0;
};

// Layers [first, last) of a model, as a stage of the loop.
class CpuStation {
 public:
  // kv_bytes: for the KV caches. delay: see PassStation. taps: of an EAGLE-3 head, see StageTaps.
  CpuStation(std::shared_ptr<const CpuModel> model, int first, int last, std::vector<int> cores, int threads, double delay,
             size_t kv_bytes, const std::vector<int>& taps = {});

  int hidden() const { return model_->shape.hidden_size; }
  int taps() const { return int(taps_.theirs.size()); }   // that rows have when they leave
  int blocks() const { return blocks_; }   // that answers may have here
  PassStation& station() { return station_; }
  PassStage& passes() { return passes_; }
  void pin() { team_.pin_caller(); }
  // Seconds of a pass over so many rows after `context` others, the choice of tokens included. Not while it works.
  double time_pass(int rows, int context);

 private:
  const float* reserve(int rows);
  double run(int start, int rows);

  const std::shared_ptr<const CpuModel> model_;
  Team team_;
  CpuVerifyStage stage_;
  Rope rope_;
  const bool last_;
  const int blocks_;
  const StageTaps taps_;
  PassStage passes_;
  PassStation station_;
};

// Layers before the exit, and the exit head. Its answers are the loop's: here it is measured.
class CpuDrafter {
 public:
  CpuDrafter(std::shared_ptr<const CpuModel> model, std::vector<int> cores, int threads);

  size_t block_bytes() const { return stage_.blocks().bytes(); }
  // Seconds of a row through the early layers after `context` others; draw: and of the exit head.
  double time_step(bool draw, int context);

 private:
  void reserve(int rows);

  const std::shared_ptr<const CpuModel> model_;
  Team team_;
  CpuDraftStage stage_;
  Rope rope_;
};

}  // namespace ppsd
