// A model's weights, packed for the kernels of this machine.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gguf_blocks.h"
#include "kernels.h"
#include "memory.h"
#include "team.h"

namespace ppsd {

// What a pass may hold is checked wherever one is put together, in every build: its rows go into buffers of fixed size. Throws
// std::logic_error: no input leads here, but a mistake of this library.
inline void check_bound(size_t count, size_t most, const char* what) {
  if (count > most)
    throw std::logic_error("a pass has " + std::to_string(count) + " " + what + ", and there is room for " + std::to_string(most));
}

constexpr char kNotFinite[] = "a weight is NaN or infinite: the file is damaged, fetch or train it again";
constexpr int kTogether = 2;   // panels that a member of a team takes at the least

// How a layer attends.
struct LayerAttention {
  bool rotary = true;   // are queries and keys rotated?
  int window = 0;       // positions that a row sees, its own included; 0: all before it
};

// How far each pair of channels turns per position. models/rotary.py says where the numbers come from.
struct Rotary {
  std::vector<float> frequencies;        // [head_dim / 2]
  float factor = 1.0f;                   // cosines and sines are multiplied by it
  // In texts longer than `original` (0: in none) the frequencies are others: these (longrope), or, where there are none,
  // those of a base that grows with the text (dynamic).
  int original = 0;
  std::vector<float> long_frequencies;
  double theta = 0.0, growth = 0.0;

  Rotary() = default;
  Rotary(std::vector<float> plain) : frequencies(std::move(plain)) {}
  bool by_length() const { return original > 0; }
  std::vector<float> at(int length) const;   // of a text
  int matters(int length) const { return by_length() && length > original ? length : 0; }   // the length, where it does
};

struct ModelShape {
  int vocab_size = 0, hidden_size = 0, intermediate_size = 0, num_layers = 0;
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float rms_norm_eps = 0.0f;
  std::vector<LayerAttention> attention;   // of each layer, or empty: all are plain

  LayerAttention attention_of(int layer) const { return attention.empty() ? LayerAttention{} : attention.at(layer); }
  int q_outputs() const { return num_heads * head_dim; }
  int kv_outputs() const { return num_kv_heads * head_dim; }
};

// A tensor of a checkpoint where it lies in memory (mapped from its file); the owner keeps it there.
struct Tensor {
  const void* data = nullptr;
  Stored stored = Stored::kFp32;
  int64_t rows = 0, columns = 1;
  bool mapped = false;   // straight from a file, so that its pages can be dropped and read again
  const BlockType* blocks = nullptr;   // what the rows consist of, instead of `stored`
  int neighbours = 0;    // head_dim, if channels that rotate together lie side by side (GGUF's order); 0: half a head apart

  bool present() const { return data != nullptr; }
  bool four_bits() const { return blocks != nullptr && blocks->four_bits != nullptr; }
  bool six_bits() const { return blocks != nullptr && blocks->six_bits != nullptr; }
  size_t row_bytes() const {
    if (blocks != nullptr) return size_t(columns) / blocks->values * blocks->bytes;
    return size_t(columns) * (stored == Stored::kFp32 ? 4 : 2);
  }
  const void* row(int64_t r) const {   // r: in Hugging Face's order
    if (neighbours > 0) {
      const int64_t channel = r % neighbours, half = neighbours / 2;
      r += (channel < half ? 2 * channel : 2 * (channel - half) + 1) - channel;
    }
    return static_cast<const uint8_t*>(data) + row_bytes() * size_t(r);
  }
};

void read_row(const Tensor& tensor, int64_t r, float* out);   // as float32: [columns]
// Row r of a tensor as one output of a matrix that has its memory; Packer::draft_head packs it to the same bits.
void pack_row(const Kernels& kernels, const Tensor& tensor, int64_t r, const Matrix& matrix, int output);

// A row of a tensor, on its way into a packed matrix.
struct RowOf {
  const Tensor* tensor;
  int64_t row;
};

struct LayerTensors {
  Tensor input_norm, q, k, v, o, q_bias, k_bias, v_bias, o_bias;
  Tensor q_norm, k_norm;              // [head_dim]; absent where the family has none
  Tensor post_norm, gate, up, down, gate_bias, up_bias, down_bias;   // absent in an `adapter` exit head: attention only
  LayerAttention attention;
};

// A decoder layer, the attention block of one, or keys and values alone (no `o`).
struct PackedLayer {
  std::vector<float> input_norm, post_norm, qkv_bias, o_bias, gate_up_bias, down_bias;   // biases: or empty
  std::vector<float> q_norm, k_norm;   // in rotary order, or empty
  Matrix qkv, o, gate_up, down;
  LayerAttention attention;
  const float* bias(const std::vector<float>& of) const { return of.empty() ? nullptr : of.data(); }
  bool has_mlp() const { return gate_up.data != nullptr; }
  HeadNorms norms(float eps) const { return q_norm.empty() ? HeadNorms{} : HeadNorms{q_norm.data(), k_norm.data(), eps}; }
  // Panels of q, k and v that a member takes at the least: whole heads where those have norms.
  int qkv_together(int head_dim) const { return q_norm.empty() ? kTogether : head_dim / kPanel; }
};

// Where in a row of all inputs of a layer's matrices, one after the other, those of each begin: [width].
struct InputOffsets {
  int qkv = 0, o, gate_up, down, width;

  explicit InputOffsets(const ModelShape& s)
      : o(s.hidden_size), gate_up(o + s.q_outputs()), down(gate_up + s.hidden_size), width(down + s.intermediate_size) {}
};

struct PackedHead {   // a norm and (part of) the LM head
  std::vector<float> norm;
  Matrix lm_head;
};

struct PackedFeedback {   // [hidden, hidden] for each distance from 1 on; none but in heads of the kind `feedback`
  std::vector<float> norm;
  std::vector<Matrix> distances;
};

// What a `feedback` head hears of verified rows after a layer in the middle: z, normed with a weight and a bias.
struct PackedTap {
  int layer = 0;                 // after so many of the model's layers; 0: it hears nothing
  std::vector<float> norm, bias; // [hidden]
  PackedLayer keys;              // keys and values alone, of [what the head's layer reads, z]: [kv outputs, 2 * hidden]
  Matrix feedback;               // [hidden, hidden]: of z, beside the normed last hidden state
};

// Bytes that packing needs, and the packing itself. Matrices lie in one stretch of memory in the order of use.
//
// int8: matrices that the file has in six bits stay as they are, but for those in a matrix with others.
// int4: matrices that the file has in four bits at even distances stay as they are, whatever they are for. Where there are such
// ones (`as_stored`), the rest is as with int8. A model of other weights is rounded to four bits, but for keys and values (few weights,
// and much of the error) and the LM head (it chooses what is said); drafts are only proposed.
class Packer {
 public:
  // filled: the memory holds all matrices already, see packed_file.h.
  Packer(const Kernels& kernels, Format format, const ModelShape& shape, Team* team, bool as_stored = false, bool filled = false)
      : kernels_(kernels), format_(format), as_stored_(as_stored), filled_(filled), shape_(shape), team_(team) {}

  size_t layer_bytes(const LayerTensors& layer) const;
  size_t matrix_bytes(int outputs, int inputs) const;
  // importance: of the layer's inputs (see InputOffsets), or null; four bits that are stored so have no use for it
  PackedLayer layer(const LayerTensors& tensors, uint8_t** memory, const float* importance = nullptr) const;
  Matrix matrix(const Tensor& tensor, uint8_t** memory) const;
  size_t lm_head_bytes(const Tensor& tensor) const;
  Matrix lm_head(const Tensor& tensor, uint8_t** memory) const;
  Matrix draft_head(const Tensor& tensor, const std::vector<int>& ids, uint8_t** memory) const;   // of these rows
  static std::vector<float> vector(const Tensor& tensor);

 private:
  Format format_for(const Tensor& tensor, bool delicate = false) const;
  // Of these tensors, without memory.
  Matrix qkv_matrix(const LayerTensors& layer) const;
  Matrix gate_up_matrix(const LayerTensors& layer) const;
  Matrix lm_head_matrix(const Tensor& tensor) const;
  Matrix plain_matrix(const Tensor& tensor) const;
  // `matrix` with its memory, filled. large: the one tensor that all rows are of, if its pages are to be dropped while
  // packing goes on
  Matrix pack(Matrix matrix, const std::vector<RowOf>& rows, const float* importance, uint8_t** memory,
              const Tensor* large = nullptr) const;

  const Kernels& kernels_;
  const Format format_;
  const bool as_stored_, filled_;
  const ModelShape shape_;
  Team* team_;
};

// Runs work(); what goes wrong in there gets a name.
template <class Work>
auto named(const std::string& what, Work&& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(what + ": " + error.what());
  }
}

// Drops the pages of a mapped tensor from this process: they are packed now, and are read from the file again if need be.
void release_pages(const Tensor& tensor);

}  // namespace ppsd
