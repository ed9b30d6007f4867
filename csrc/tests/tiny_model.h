// A small random model for tests of the CPU library, and random requests.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "../cpu/checkpoint.h"
#include "check.h"

namespace ppsd::test {

constexpr int kContext = 320;

// Random tensors, large enough for the answers to be neither constant nor uniform.
class TinyWeights {
 public:
  TinyWeights(const ModelShape& shape, uint64_t seed) : shape_(shape), random_(seed) {}

  NamedTensors model() {
    NamedTensors tensors{{"model.embed_tokens.weight", matrix(shape_.vocab_size, shape_.hidden_size)},
                         {"model.norm.weight", vector(shape_.hidden_size)}};
    for (int i = 0; i < shape_.num_layers; ++i) add_layer("model.layers." + std::to_string(i) + ".", true, &tensors);
    return tensors;
  }
  NamedTensors exit_head() {   // a layer, and one that is attention only
    NamedTensors tensors{{"norm.weight", vector(shape_.hidden_size)}};
    add_layer("layers.0.", true, &tensors);
    add_layer("layers.1.", false, &tensors);
    return tensors;
  }

 private:
  void add_layer(const std::string& prefix, bool mlp, NamedTensors* tensors) {
    const auto add = [&](const char* name, Tensor tensor) { (*tensors)[prefix + name] = tensor; };
    add("input_layernorm.weight", vector(shape_.hidden_size));
    add("self_attn.q_proj.weight", matrix(shape_.q_outputs(), shape_.hidden_size));
    add("self_attn.k_proj.weight", matrix(shape_.kv_outputs(), shape_.hidden_size));
    add("self_attn.v_proj.weight", matrix(shape_.kv_outputs(), shape_.hidden_size));
    add("self_attn.o_proj.weight", matrix(shape_.hidden_size, shape_.q_outputs()));
    if (!mlp) return;
    add("post_attention_layernorm.weight", vector(shape_.hidden_size));
    add("mlp.gate_proj.weight", matrix(shape_.intermediate_size, shape_.hidden_size));
    add("mlp.up_proj.weight", matrix(shape_.intermediate_size, shape_.hidden_size));
    add("mlp.down_proj.weight", matrix(shape_.hidden_size, shape_.intermediate_size));
  }
  Tensor matrix(int rows, int columns) { return tensor(rows, columns, 0.0f, 0.15f); }
  Tensor vector(int size) { return tensor(size, 1, 1.0f, 0.1f); }
  Tensor tensor(int rows, int columns, float mean, float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    data_.push_back(std::make_unique<std::vector<float>>(size_t(rows) * columns));
    for (float& x : *data_.back()) x = normal(random_);
    return {data_.back()->data(), Stored::kFp32, rows, columns, false};
  }

  const ModelShape shape_;
  Random random_;
  std::vector<std::unique_ptr<std::vector<float>>> data_;
};

// Allows about a third of the ids, which ones is a hash of all ids of the answer before.
class HashMask final : public TokenMask {
 public:
  explicit HashMask(int vocabulary) : vocabulary_(vocabulary) {}

  static uint64_t after(uint64_t hash, int id) { return (hash ^ uint64_t(id)) * 0x9E3779B97F4A7C15u; }
  static bool allows(uint64_t hash, int id) { return (after(hash, id) >> 40) % 3 == 0; }

  void fill(int start, const std::vector<int>& ids, int rows, uint32_t* bits) override {
    check(start >= 0 && start < int(hashes_.size()), "a mask is told of ids with a gap", "CPU library");
    hashes_.resize(size_t(start) + 1);
    for (int id : ids) hashes_.push_back(after(hashes_.back(), id));
    for (int r = 0; r < rows; ++r)
      for (int id = 0; id < vocabulary_; ++id)
        if (allows(hashes_[hashes_.size() - size_t(rows - r)], id))
          bits[r * TokenMask::words(vocabulary_) + id / 32] |= 1u << (id % 32);
  }

 private:
  const int vocabulary_;
  std::vector<uint64_t> hashes_ = {1};   // after so many ids
};

inline ModelShape tiny_shape() {
  ModelShape shape;
  shape.vocab_size = 259, shape.hidden_size = 64, shape.intermediate_size = 96, shape.num_layers = 5;
  shape.num_heads = 4, shape.num_kv_heads = 2, shape.head_dim = 32, shape.rms_norm_eps = 1e-5f;
  return shape;
}

// With an exit head that has layers of its own and half of the vocabulary. by_length: longer texts are rotated otherwise.
inline std::shared_ptr<const CpuModel> tiny_model(const Kernels& kernels, Format format, TinyWeights* weights, const ModelShape& shape,
                                           int exit_layer, bool by_length) {
  Packing packing;
  packing.format = format;
  packing.kv = format == Format::kFp32 ? Stored::kFp32 : format == Format::kBf16 ? Stored::kBf16 : Stored::kInt8;
  packing.threads = 2;
  std::vector<float> frequencies;
  for (int i = 0; i < shape.head_dim / 2; ++i)
    frequencies.push_back(std::pow(10000.0f, -2.0f * float(i) / float(shape.head_dim)));
  std::vector<int> draft_ids;
  for (int id = 0; id < shape.vocab_size; id += 2) draft_ids.push_back(id);
  Rotary rotary(frequencies);
  if (by_length) rotary.original = 40, rotary.theta = 10000.0, rotary.growth = 2.0;
  const auto model = pack_model(kernels, shape, weights->model(), rotary, packing);
  return with_exit_head(*model, exit_layer, weights->exit_head(), draft_ids, 2);
}

// Half of them repeat themselves.
inline std::vector<int> random_prompt(Random& random, int most, int vocabulary) {
  const int period = chance(random, 50) ? between(random, 1, 8) : most, length = between(random, 1, most);
  std::vector<int> prompt;
  for (int i = 0; i < length; ++i)
    prompt.push_back(i < period ? between(random, 0, vocabulary - 1) : prompt[size_t(i - period)]);
  return prompt;
}

// Some with a mask.
inline Sampling random_sampling(Random& random, int vocabulary) {
  Sampling sampling;
  sampling.seed = random();
  if (chance(random, 30)) sampling.presence_penalty = 0.1f * float(between(random, -20, 20));
  if (chance(random, 30)) sampling.frequency_penalty = 0.1f * float(between(random, -20, 20));
  for (int id = chance(random, 20) ? between(random, 0, 9) : vocabulary; id < vocabulary; id += between(random, 1, 40))
    sampling.logit_bias.emplace_back(id, float(between(random, -20, 4)));
  if (chance(random, 20)) sampling.min_tokens = between(random, 1, 20);
  if (chance(random, 30)) sampling.logprobs = between(random, 0, 20);
  if (chance(random, 30)) {
    sampling.draft_mask = std::make_shared<HashMask>(vocabulary);
    sampling.mask = std::make_shared<HashMask>(vocabulary);
  }
  if (chance(random, 40)) return sampling;
  sampling.temperature = 0.5f + 0.1f * float(between(random, 0, 8));
  if (chance(random, 50)) sampling.top_k = between(random, 1, 40);
  if (chance(random, 50)) sampling.top_p = 0.9f;
  if (chance(random, 30)) sampling.min_p = 0.02f;
  if (chance(random, 40)) sampling.repetition_penalty = 1.2f;
  return sampling;
}

}  // namespace ppsd::test
