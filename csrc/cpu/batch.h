// Many texts written side by side, one row of each in a pass over the weights: how training text is sampled, see
// ppsd_rt/distill. What a text becomes depends on it alone, not on those beside it.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "stage.h"

namespace ppsd {

// A text's next row, and how the token after it is to be chosen.
struct BatchRow {
  int id = 0, position = 0;
  float inverse_temperature = 0.0f;   // 0: greedy
  uint64_t seed = 0;                  // of the noise, see noise.h
};

class CpuBatch {
 public:
  // Texts of at most `capacity` tokens; `keep`: the layers, in order, whose output is handed out; 0: the embedding.
  CpuBatch(std::shared_ptr<const CpuModel> model, int threads, int texts, int capacity, const std::vector<int>& keep);

  int texts() const { return int(texts_.size()); }
  int capacity() const { return capacity_; }
  int kept() const { return int(keep_.size()); }
  int hidden_size() const { return model_->shape.hidden_size; }

  // rows [texts]; chosen [texts]; kept [texts][keep.size()][hidden] bfloat16, before any norm. Throws std::runtime_error
  // where a logit is NaN or infinite.
  void step(const BatchRow* rows, int* chosen, uint16_t* kept);

 private:
  void keep(int kind, uint16_t* kept) const;

  const std::shared_ptr<const CpuModel> model_;
  const int capacity_;
  const std::vector<int> keep_;
  Team team_;
  std::vector<float> rope_, x_;          // x: [texts][hidden]
  std::deque<LayerStack> stacks_;        // cut at the kept layers
  std::deque<OwnBlocks> texts_;          // the KV cache of each
  Head head_;
};

}  // namespace ppsd
