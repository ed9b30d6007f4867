// Consecutive layers with their KV cache, and a head with its choice of tokens: what CPU stages are made of.
#pragma once

#include <memory>
#include <vector>

#include "../core/protocol.h"
#include "model.h"
#include "sampler.h"

namespace ppsd {

// Cosines and signed sines: for each position, for each panel of a head (channels in rotary order), sixteen cosines and
// then sixteen sines: [capacity][head_dim / 16][2][16]. prompt: rows that are rotated as one text of that length, where
// lengths matter; each later row is rotated as the last one of a text of its own, as it is when it is decoded.
std::vector<float> make_rope(const Rotary& rotary, int capacity, int prompt = 0);

// Of a pass: consecutive rows of a text, at positions [start, start + rows); `blocks`: where its cache lies, span by span, see
// KvCache; `spans`: how many there are; `prompt`: of the rows, those of a prompt that nothing is chosen after, which come first.
struct Segment {
  int rows = 0, start = 0;
  uint8_t* const* blocks = nullptr;
  int spans = 0;
  int prompt = 0;
};

// x [n] over its root mean square, times weight [n].
void normalize(const float* x, const std::vector<float>& weight, float eps, float* out);
void normalize(const float* x, const PackedTap& tap, float eps, float* out);   // z, of a row after the tap's layer

class LayerStack {
 public:
  // The caches of texts lie in blocks of kSpan positions; in each of them this stack's bytes are [offset, end()).
  LayerStack(const Kernels& kernels, const ModelShape& shape, Format format, Stored kv,
             std::vector<const PackedLayer*> layers, int members, size_t offset = 0);

  size_t begin() const { return offset_; }
  size_t end() const;
  void followed_by(const Matrix* matrix) { next_ = matrix; }   // is read after the last layer
  // From now on member 0 adds up the squares of what goes into the matrices, in [layers][InputOffsets::width], 0 at first.
  void observe(float* squares);
  // The first layer's queries, keys and values read `wide` [kPassRows][inputs] as it is, and no norm of x.
  void read_wide(const float* wide);
  // A pass keeps what its rows are after so many of these layers, in tapped().
  void tap(std::vector<int> layers);
  const float* tapped() const { return tapped_.data(); }   // [rows][taps][hidden]
  int size() const { return int(layers_.size()); }

  // Which rows a pass has, kept until it ends; by one thread, before the members begin. Throws std::logic_error where there is
  // no room for them.
  void begin_pass(const std::vector<Segment>& segments);
  // By every member: x [rows][hidden] in place. False: cancelled on the way.
  bool pass(Team& team, int member, const float* rope, float* x, const Cancelled& cancelled = nullptr);
  // Both, by a team.
  bool run(Team& team, const std::vector<Segment>& segments, const float* rope, float* x, const Cancelled& cancelled = nullptr);

 private:
  KvCache in_blocks(size_t layer, uint8_t* const* blocks) const;
  void attend_segments(size_t layer, int begin, int end, ReadAhead* ahead);
  void keep_taps(size_t layer, const float* x);

  const Kernels& kernels_;
  const ModelShape shape_;
  const Format format_;
  const Stored kv_;
  const std::vector<const PackedLayer*> layers_;
  const size_t offset_;
  const Matrix* next_ = nullptr;
  float* squares_ = nullptr;   // null, but in measure_importance
  const float* wide_ = nullptr;
  std::vector<int> taps_;
  std::vector<float> tapped_;
  int rows_ = 0;                                 // of the pass
  std::vector<Segment> segments_;                // of the pass
  std::vector<int> segment_rows_, segment_units_;   // up to and including each: rows, and units of attention
  std::vector<int> row_positions_;               // [rows of the segments]
  std::vector<std::vector<KvCache>> caches_;     // of each member [kPassRows]: those of the rows, in the layer at hand
  std::vector<float> queries_, mixed_;           // [kPassRows][heads][head_dim]
  std::vector<Memory> inputs_;                   // of each member: the rows as the next matrix wants them
  Memory mlp_;                                   // of all: the MLP's inner activations
  std::vector<Shares> shares_;                   // of each phase
  std::atomic<bool> cancelled_{false};
};

// What a head of the kind `feedback` adds to the exit hidden state that it draws from: of the newest row that has passed
// all layers, seen from `distance` rows after it.
class FeedbackStack {
 public:
  FeedbackStack(const Kernels& kernels, const ModelShape& shape, const PackedFeedback& feedback, const PackedTap& tap, int members);

  int most_distance() const { return int(feedback_.distances.size()); }
  void begin_pass(int rows);   // throws std::logic_error where there is no room for them
  // By every member: x [rows][hidden] += W[distance] norm(states [rows][hidden]); distance: 1 to most_distance(). Of a head with a
  // tap the states have been normed, by `hear`.
  void pass(Team& team, int member, const float* states, int distance, float* x);
  // By a team: states [rows][2][hidden], after the last layer and at the tap, become what W[distance] reads, [rows][hidden].
  std::vector<float> hear(Team& team, const std::vector<const float*>& states);

 private:
  const Kernels& kernels_;
  void add(Team& team, int member, const Matrix& matrix, const Activations& input, float* x);

  const PackedFeedback& feedback_;
  const PackedTap& tap_;
  const float eps_;
  int rows_ = 0;                 // of the pass
  std::vector<Memory> inputs_;   // of each member
  Shares shares_;
};

}  // namespace ppsd
