// Drafting with an EAGLE-3 head: its weights, what it knows of a text, and its passes. models/eagle3.py tells of its tensors.
//
// Row i of the head has the token at position i + 1 and the feature of position i; it foresees the token at i + 2. The feature
// is made of the hidden states at the taps, once the row at position i is verified; until then it is the output of row i - 1.
#pragma once

#include <algorithm>
#include <vector>

#include "layers.h"

namespace ppsd {

struct Eagle {
  ModelShape shape;                    // of the head's own layers
  Rotary rotary;
  std::vector<int> taps;               // after so many layers of the model
  bool norm_before_residual = false, norm_output = false;
  std::vector<float> input_norm;       // [taps * hidden]: one norm of all taps, or empty
  std::vector<std::vector<float>> fc_norms;   // [hidden]: one of each, or none
  Matrix fc;                           // [hidden, taps * hidden]
  std::vector<float> fc_bias;          // or empty
  Tensor embedding;                    // the head's own, or the model's
  std::vector<float> embedding_norm, feature_norm;
  std::vector<PackedLayer> layers;     // queries, keys and values of the first one read embedding and feature
  PackedHead head;

  size_t tap_width() const { return taps.size() * size_t(shape.hidden_size); }
  size_t bytes() const;                // that a draft reads
};

// What the head knows of one text: tokens, taps of verified rows that it has not read, and its newest outputs.
class EagleText {
 public:
  // Tokens at [start, start + count); later ones are void, and so is what came of tokens that are others now.
  void know(int start, const int* ids, int count);
  // Rows at positions [start, start + rows) are verified: taps [rows][width]. Rows before, that the head has not seen, are
  // another text's with the same beginning: so are the head's.
  void verified(int start, int rows, const float* taps, size_t width);

  int pending() const { return std::max(end_ - sure_, 0); }   // verified rows that the head has not read
  int readable() const { return std::min(end_, int(ids_.size()) - 1); }   // rows whose feature and token are here
  const float* output() const { return outputs_.empty() ? nullptr : outputs_.back().data(); }   // of the newest row

 private:
  friend class EagleStack;
  void cut(int length);                              // only so many tokens are the text's
  void drop(int rows);                               // head rows from `rows` on are void
  const float* taps(int position, size_t width) const { return taps_.data() + size_t(position - first_) * width; }
  void read(int rows, const float* output, size_t hidden, bool sure);

  std::vector<int> ids_;
  int sure_ = 0, rows_ = 0;
  int first_ = 0, end_ = 0;                          // of the positions whose taps are here; first_ <= sure_
  std::vector<float> taps_;
  std::vector<std::vector<float>> outputs_;          // of the newest rows
};

// The head's rows of several texts, in the order in which they can be computed. Bodies compute them.
class EagleStack {
 public:
  explicit EagleStack(const Eagle& eagle)
      : eagle_(eagle), raw_(size_t(kPassRows) * eagle.tap_width()), x_(size_t(kPassRows) * eagle.shape.hidden_size) {}
  virtual ~EagleStack() = default;

  size_t tap_width() const { return eagle_.tap_width(); }

  struct Work {
    EagleText* text;
    uint8_t* const* blocks;
    int spans;
    int rows;                            // that its head is to have
  };
  // Verified features first, many rows in a pass; then the head's own outputs, a row of each text at a time.
  void advance(const std::vector<Work>& works);
  // The same for one text, as far as verified features lead.
  void catch_up(EagleText* text, uint8_t* const* blocks, int spans) { advance({{text, blocks, spans, text->readable()}}); }

 protected:
  // x_ [rows][hidden], in place: features and the tokens `ids` -> outputs. verified: the features are raw_ [rows][taps * hidden];
  // else those in x_ are outputs of the rows before.
  virtual void pass(const std::vector<Segment>& segments, const std::vector<int>& ids, bool verified) = 0;

  const Eagle& eagle_;
  std::vector<float> raw_, x_;           // of kPassRows
};

class CpuEagleStack final : public EagleStack {
 public:
  // The caches of texts lie in blocks, as those of a LayerStack do: this head's bytes are [offset, end()).
  CpuEagleStack(const Kernels& kernels, const Eagle& eagle, Format format, Stored kv, int members, size_t offset);

  size_t end() const { return layers_.end(); }
  void use(Team* team) { team_ = team; }
  void reserve(int rows);               // the longest text

 private:
  void make_features(int rows);
  void pass(const std::vector<Segment>& segments, const std::vector<int>& ids, bool verified) override;

  const Kernels& kernels_;
  Team* team_ = nullptr;
  LayerStack layers_;
  std::vector<float> rope_;
  int capacity_ = 0;
  std::vector<float> wide_;              // [kPassRows][2 * hidden]
  std::vector<Memory> inputs_;           // of each member
  Shares shares_;
};

}  // namespace ppsd
