// A small random model for tests of the CPU library, and random requests.
#pragma once

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

ModelShape tiny_shape();
// With an exit head that has layers of its own and half of the vocabulary. by_length: longer texts are rotated otherwise.
std::shared_ptr<const CpuModel> tiny_model(const Kernels& kernels, Format format, TinyWeights* weights, const ModelShape& shape,
                                           int exit_layer = 2, bool by_length = false);
std::vector<int> random_prompt(Random& random, int most, int vocabulary);   // half of them repeat themselves
Sampling random_sampling(Random& random, int vocabulary);   // some with a mask
void check_mask(const std::vector<int>& text, size_t prompt, const std::string& where);   // of random_sampling

}  // namespace ppsd::test
