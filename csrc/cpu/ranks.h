// The stages of ranks. Those of the C++ kernels work for the loop; Python's (csrc/bindings/ranks.cpp) decode an answer at a
// time, and make a Remote for it.
#pragma once

#include <memory>
#include <vector>

#include "../pipeline/remote.h"
#include "../pipeline/station.h"
#include "../serving/pass_station.h"
#include "pass_stage.h"
#include "stage.h"

namespace ppsd {

// What the first message of an answer says of it besides the rows: kWireSettings words, and more for biases and stop ids.
struct Settings {
  int end = 0;      // positions that the answer may have
  int prompt = 0;   // tokens of its prompt
  int grammar = 0;  // the number of its grammar, which the last rank has been told of; 0: it has none
  Sampling sampling;
};
std::vector<int32_t> words_of(const Settings& settings);
Settings settings_of(const std::vector<int32_t>& words);   // throws std::runtime_error for what means nothing

// A verification stage that waits for rows.
class RankStation {
 public:
  virtual ~RankStation() = default;
  Station& station() { return *station_; }
  int hidden() const { return hidden_; }
  // Of the grammar with this number; null where another one has come since, and the answer is void.
  using Masks = std::function<std::shared_ptr<TokenMask>(int grammar)>;
  void use(Masks masks) { masks_ = std::move(masks); }   // of the last rank, before it works

 protected:
  // Makes the stage ready for an answer that keeps so many rows.
  using Begin = std::function<void(int keep, const Settings& settings)>;

  explicit RankStation(int hidden) : hidden_(hidden) {}
  void wait_for_rows(VerifyStage* stage, bool last, Begin begin, double delay);   // makes the station; arguments: see Station

 private:
  const int hidden_;
  Masks masks_;
  std::unique_ptr<Station> station_;
};

// The stage in front of the exit head, with the head.
class RankDrafter {
 public:
  virtual ~RankDrafter() = default;
  virtual void pin() {}                 // the calling thread, which drafts from now on
  virtual int length() const = 0;       // rows that an answer may keep
  int hidden() const { return hidden_; }

  // planner: chooses the schedule, or null. grammar: its number; sampling has its mask for drafts.
  std::unique_ptr<Remote> start(const std::vector<int>& prompt, int keep, const Sampling& sampling, const Schedule& schedule,
                                std::shared_ptr<Planner> planner, const Limits& limits, uint64_t epoch, bool report_drafts,
                                const Oracle& oracle, bool trace, int grammar = 0);

 protected:
  // hears: its head is of a kind that draws on verified rows
  RankDrafter(int hidden, bool hears) : hidden_(hidden), hears_(hears) {}
  virtual void begin(int keep, const Settings& settings, const Oracle& oracle) = 0;
  virtual DraftStage* stage() = 0;

 private:
  const int hidden_;
  const bool hears_;
};

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
  // kv_bytes: for the KV caches. delay: see PassStation.
  CpuStation(std::shared_ptr<const CpuModel> model, int first, int last, std::vector<int> cores, int threads, double delay,
             size_t kv_bytes);

  int hidden() const { return model_->shape.hidden_size; }
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
