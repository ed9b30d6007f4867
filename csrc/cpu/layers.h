// Consecutive layers with their KV cache, and a head with its choice of tokens: what CPU stages are made of.
#pragma once

#include <memory>
#include <vector>

#include "../pipeline/stages.h"
#include "model.h"
#include "sampler.h"

namespace ppsd {

// Cosines and signed sines: for each position, for each panel of a head (channels in rotary order), sixteen cosines and
// then sixteen sines: [capacity][head_dim / 16][2][16]. frequencies: [head_dim / 2].
std::vector<float> make_rope(const std::vector<float>& frequencies, int capacity);

class LayerStack {
 public:
  // `texts`: how many have a cache of their own here. One: a pass takes consecutive rows of it. Several: a row of each.
  LayerStack(const Kernels& kernels, const ModelShape& shape, Format format, Stored kv,
             std::vector<const PackedLayer*> layers, int members, int texts = 1);

  void reserve(int capacity);   // rows of cache for each text; what it holds stays
  void followed_by(const Matrix* matrix) { next_ = matrix; }   // is read behind the last layer
  // From now on member 0 adds up the squares of what goes into the matrices, in [layers][InputOffsets::width], 0 at first.
  void observe(float* squares);
  void fill();                  // the cache, with made-up numbers: to measure what is read from memory that is really there
  int capacity() const { return capacity_; }
  int size() const { return int(layers_.size()); }

  void begin_pass();   // by one thread, before the members begin
  // The same, where `siblings` of the rows [start, start + rows) lie behind them in x. Several texts have none.
  void begin_pass(int start, int rows, const std::vector<Sibling>& siblings);
  // By every member: rows x [rows + siblings][hidden], those of the text at positions [start, start + rows), in place.
  // False: cancelled on the way.
  bool pass(Team& team, int member, const float* rope, float* x, int rows, int start, const Cancelled& cancelled);
  // The same for x [texts][hidden], one row of every text, at these positions.
  void pass_side_by_side(Team& team, int member, const float* rope, float* x, const int* positions);
  void adopt(int position);   // of the two rows at a position, the sibling's now is the text's

 private:
  bool run(Team& team, int member, const float* rope, float* x, int rows, int start, const int* positions,
           const Cancelled& cancelled);
  Siblings siblings_of(size_t layer) const;

  const Kernels& kernels_;
  const ModelShape shape_;
  const Format format_;
  const Stored kv_;
  const std::vector<const PackedLayer*> layers_;
  const int texts_;
  const Matrix* next_ = nullptr;
  float* squares_ = nullptr;   // null, but in measure_importance
  int capacity_ = 0;
  Memory kv_memory_;
  std::vector<KvCache> caches_;                  // [layers][texts]
  Memory sibling_memory_;                        // [layers], keys and values
  std::vector<int> sibling_positions_, order_;   // of the pass: see Siblings
  std::vector<float> queries_, mixed_;           // [kPassRows][heads][head_dim]
  std::vector<Memory> inputs_;                   // of each member: the rows as the next matrix wants them
  Memory mlp_;                                   // of all: the MLP's inner activations
  std::vector<Shares> shares_;                   // of each phase
  std::atomic<bool> cancelled_{false};
};

// What a head of the kind `feedback` adds to the exit hidden state that it draws from: of the newest row that has passed
// all layers, seen from `distance` rows behind it.
class FeedbackStack {
 public:
  FeedbackStack(const Kernels& kernels, const ModelShape& shape, const PackedFeedback& feedback, int members);

  int most_distance() const { return int(feedback_.distances.size()); }
  void begin_pass() { shares_.reset(); }
  // By every member: x [hidden] += W[distance] norm(state [hidden]); distance: 1 to most_distance().
  void pass(Team& team, int member, const float* state, int distance, float* x);

 private:
  const Kernels& kernels_;
  const PackedFeedback& feedback_;
  const float eps_;
  std::vector<Memory> inputs_;   // of each member
  Shares shares_;
};

class HeadStack {
 public:
  HeadStack(const Kernels& kernels, const ModelShape& shape, const PackedHead& head, const std::vector<int>& draft_ids,
            int members);

  void begin_pass() { shares_.reset(); }
  // By every member: the LM head on the rows x [rows][hidden] that the sampler has been told of.
  void pass(Team& team, int member, const float* x, int rows, const Sampler& sampler);
  // The same, for rows that choose the tokens for these positions each in its own way, by the best score: `best` is the
  // member's.
  void pass_side_by_side(Team& team, int member, const float* x, int rows, const int* positions, const RowChoice* each,
                         Candidate* best);
  const int* draft_ids() const { return draft_ids_.empty() ? nullptr : draft_ids_.data(); }
  int outputs() const { return head_.lm_head.outputs; }

 private:
  void run(Team& team, int member, const float* x, int rows, LogitsPhase phase);

  const Kernels& kernels_;
  const PackedHead& head_;
  const std::vector<int>& draft_ids_;
  const float eps_;
  std::vector<Memory> inputs_;   // of each member
  Shares shares_;
};

}  // namespace ppsd
