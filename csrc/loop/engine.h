// A model with a team of threads, for scores and measurements. Answers are the loop's (loop.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "cpu_passes.h"

namespace ppsd {

class CpuEngine {
 public:
  CpuEngine(std::shared_ptr<const CpuModel> model, int threads);   // throws NoThread

  int threads() const { return passes_.members(); }
  const std::shared_ptr<const CpuModel>& model() const { return model_; }
  Team& team() { return passes_.team(); }
  std::string pin_problem() { return team().pin_problem(); }   // one line about a thread that could not be pinned, or nothing

  // The logits after each of the `last` rows at the end of a text: [last][vocabulary]. Rows that the text before began with
  // are not run again.
  std::vector<float> logits(const std::vector<int>& ids, int last);
  // Of every id of a text but the first, by what stands before it, at temperature 1; and the `top` best there.
  std::vector<Logprobs> logprobs(const std::vector<int>& ids, int top);

 private:
  void read(const std::vector<int>& ids, int last, const std::function<void(int row, const float* logits)>& told);
  void reserve(int rows);

  const std::shared_ptr<const CpuModel> model_;
  CpuPasses passes_;
  Head head_;
  Sampler sampler_;
  std::unique_ptr<TextBlocks> blocks_;
  int rotated_as_ = 0;        // see Rotary::matters; of the rows that are here
  std::vector<int> tokens_;   // of these rows
};

}  // namespace ppsd
