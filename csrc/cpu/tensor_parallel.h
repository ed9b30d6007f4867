// A share of every layer, for the tensor-parallel baseline: some of the heads, some of the MLP's inner channels, some of
// the vocabulary. The caller adds up what the ranks make of a row, twice a layer. One thread.
#pragma once

#include <vector>

#include "layers.h"
#include "stage.h"

namespace ppsd {

class LayerShares {
 public:
  // The model is packed from the share's tensors; its shape counts the share's heads, channels and ids, `hidden` is whole.
  explicit LayerShares(const CpuModel& model);

  void reserve(int capacity);
  // x [rows][hidden] at positions [start, start + rows), rows up to kPassRows -> this share's part of what is added to x.
  void attention(int layer, const float* x, int rows, int start, float* part);
  void mlp(int layer, const float* x, int rows, float* part);
  Candidate best(const float* x);   // of one row: the share's best logit and its index

 private:
  const CpuModel& model_;
  const Kernels& kernels_;
  int capacity_ = 0;
  Memory cache_memory_, narrow_, heads_, mlp_;
  std::vector<KvCache> caches_;
  std::vector<float> rope_, queries_, mixed_;
};

}  // namespace ppsd
