#include "tensor_parallel.h"

#include <algorithm>
#include <limits>

namespace ppsd {

LayerShares::LayerShares(const CpuModel& model)
    : model_(model),
      kernels_(*model.kernels),
      narrow_(Activations::bytes(kernels_, model.format, kPassRows, model.shape.hidden_size)),
      heads_(Activations::bytes(kernels_, model.format, kPassRows, model.shape.q_outputs())),
      mlp_(Activations::bytes(kernels_, model.format, kPassRows, model.shape.intermediate_size)),
      queries_(size_t(kPassRows) * model.shape.q_outputs()),
      mixed_(queries_.size()) {}

void LayerShares::reserve(int capacity) {
  if (capacity <= capacity_) return;
  capacity_ = (capacity + kSpan - 1) / kSpan * kSpan;
  const ModelShape& s = model_.shape;
  rope_ = make_rope(model_.rotary, capacity_);
  const size_t one = KvCache::bytes(model_.kv, s.num_kv_heads, s.head_dim, capacity_);
  cache_memory_ = Memory(2 * one * s.num_layers);
  caches_.clear();
  for (int layer = 0; layer < s.num_layers; ++layer) {
    uint8_t* at = cache_memory_.as<>() + 2 * one * layer;
    caches_.push_back({model_.kv, s.num_kv_heads, s.head_dim, capacity_, at, at + one});
  }
}

void LayerShares::attention(int layer, const float* x, int rows, int start, float* part) {
  const ModelShape& s = model_.shape;
  const PackedLayer& weights = model_.layers[layer];
  const Activations narrow = Activations::at(kernels_, narrow_.as<>(), model_.format, rows, s.hidden_size);
  const Activations heads = Activations::at(kernels_, heads_.as<>(), model_.format, rows, s.q_outputs());
  kernels_.normalize(x, rows, weights.input_norm.data(), s.rms_norm_eps, narrow);
  const QkvPhase qkv{&weights.qkv, weights.bias(weights.qkv_bias), &narrow, rows, start, s.num_heads, weights.attention.rotary ? rope_.data() : nullptr,
                     queries_.data(), &caches_[layer], nullptr, nullptr, {}, weights.norms(s.rms_norm_eps)};
  kernels_.qkv(qkv, 0, weights.qkv.panels());
  const AttendPhase attend{queries_.data(), &caches_[layer], rows,    start,                   s.num_heads,
                           mixed_.data(),   nullptr,         nullptr, weights.attention.window};
  kernels_.attend(attend, 0, attend.units());
  kernels_.convert(mixed_.data(), rows, heads);
  std::fill_n(part, size_t(rows) * s.hidden_size, 0.0f);
  kernels_.add({&weights.o, weights.bias(weights.o_bias), &heads, rows, part}, 0, weights.o.panels());
}

void LayerShares::mlp(int layer, const float* x, int rows, float* part) {
  const ModelShape& s = model_.shape;
  const PackedLayer& weights = model_.layers[layer];
  const Activations narrow = Activations::at(kernels_, narrow_.as<>(), model_.format, rows, s.hidden_size);
  const Activations inner = Activations::at(kernels_, mlp_.as<>(), model_.format, rows, s.intermediate_size);
  kernels_.normalize(x, rows, weights.post_norm.data(), s.rms_norm_eps, narrow);
  kernels_.swiglu({&weights.gate_up, weights.bias(weights.gate_up_bias), &narrow, rows, &inner}, 0, s.intermediate_size / kBlock);
  std::fill_n(part, size_t(rows) * s.hidden_size, 0.0f);
  kernels_.add({&weights.down, weights.bias(weights.down_bias), &inner, rows, part}, 0, weights.down.panels());
}

Candidate LayerShares::best(const float* x) {
  const int position = 0;   // greedy: no noise depends on it
  const Activations narrow = Activations::at(kernels_, narrow_.as<>(), model_.format, 1, model_.shape.hidden_size);
  kernels_.normalize(x, 1, model_.head.norm.data(), model_.shape.rms_norm_eps, narrow);
  Candidate best{std::numeric_limits<float>::lowest(), std::numeric_limits<int>::max()};
  LogitsPhase phase{};
  phase.weights = &model_.head.lm_head;
  phase.input = &narrow;
  phase.rows = 1;
  phase.positions = &position;
  phase.choice = Choice::kBest;
  phase.repetition_penalty = 1.0f;
  phase.best = &best;
  uint8_t strange = 0;
  phase.strange = &strange;
  kernels_.logits(phase, 0, model_.head.lm_head.panels());
  return best;
}

}  // namespace ppsd
