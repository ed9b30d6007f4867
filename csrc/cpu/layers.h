// Consecutive layers with their KV cache, and a head with its choice of tokens: what CPU stages are made of.
#pragma once

#include <memory>
#include <vector>

#include "../pipeline/stages.h"
#include "model.h"
#include "sampler.h"

namespace ppsd {

// Cosines and signed sines: for each position, for each panel of a head (channels in rotary order), sixteen cosines and
// then sixteen sines: [capacity][head_dim / 16][2][16]. prompt: rows that are rotated as one text of that length, where
// lengths matter; each later row is rotated as the last one of a text of its own, as it is when it is decoded.
std::vector<float> make_rope(const Rotary& rotary, int capacity, int prompt = 0);

// Of a pass over several texts: consecutive rows of one of them, at positions [start, start + rows); `blocks`: where its cache
// lies, span by span, see KvCache; `spans`: how many there are.
struct Segment {
  int rows = 0, start = 0;
  uint8_t* const* blocks = nullptr;
  int spans = 0;
};

// Consecutive rows that pass through a stack together, with the siblings that lie at their positions.
struct Piece {
  int rows = 0;
  std::vector<Sibling> siblings;
  int all_rows() const { return rows + int(siblings.size()); }
};
// The rows [start, start + left), or as many of them as fit into a pass. siblings: of all rows, by position.
Piece next_piece(int start, int left, const std::vector<Sibling>& siblings);

class LayerStack {
 public:
  // `texts`: how many have a cache of their own here. One: a pass takes consecutive rows of it. Several: a row of each.
  LayerStack(const Kernels& kernels, const ModelShape& shape, Format format, Stored kv,
             std::vector<const PackedLayer*> layers, int members, int texts = 1);

  void reserve(int capacity);   // rows of cache for each text; what it holds stays
  // The same for at least min(rows, most), growing by doubling up to `most`: an answer that may become long and does not
  // costs neither memory nor the time to clear it.
  void hold(int rows, int most);
  // Instead of reserve: the caches of any number of texts lie in blocks of kSpan positions. In each of them this stack's
  // bytes begin at `offset`; where they end is returned.
  size_t keep_in_blocks(size_t offset);
  // Rows [0, rows) of the one text's cache, into the blocks of another stack of these layers.
  void copy_to_blocks(const LayerStack& other, int rows, uint8_t* const* blocks) const;
  void followed_by(const Matrix* matrix) { next_ = matrix; }   // is read after the last layer
  // From now on member 0 adds up the squares of what goes into the matrices, in [layers][InputOffsets::width], 0 at first.
  void observe(float* squares);
  void fill();                  // the cache, with made-up numbers: to measure what is read from memory that is really there
  int capacity() const { return capacity_; }
  int size() const { return int(layers_.size()); }

  // Which rows a pass has; by one thread, before the members begin. Throws std::logic_error where there is no room for them.
  // Of one text the rows [start, start + rows), and after them in x their siblings, by position.
  void begin_pass(int start, int rows, const std::vector<Sibling>& siblings = {});
  void begin_pass(const int* positions);   // or of every text the row at this position
  void begin_pass(const std::vector<Segment>& segments);   // or of texts in blocks; kept until the pass ends
  // By every member: x [rows][hidden] in place. False: cancelled on the way.
  bool pass(Team& team, int member, const float* rope, float* x, const Cancelled& cancelled = nullptr);
  void adopt(int position);   // of the two rows at a position, the sibling's now is the text's

 private:
  void begin_pass(int start, int rows, const int* positions);
  KvCache in_blocks(size_t layer, uint8_t* const* blocks) const;
  void attend_segments(size_t layer, int begin, int end, ReadAhead* ahead);
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
  int start_ = 0, rows_ = 0;                     // of the pass; rows_: siblings included
  const int* positions_ = nullptr;               // or of each row its own
  std::vector<int> sibling_positions_, order_;   // of the pass: see Siblings
  size_t block_offset_ = 0;
  std::vector<Segment> segments_;                // of the pass
  std::vector<int> segment_rows_, segment_units_;   // up to and including each: rows, and units of attention
  std::vector<int> row_positions_;               // [rows of the segments]
  std::vector<std::vector<KvCache>> row_caches_; // of each member [kPassRows]: of the layer at hand
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
  FeedbackStack(const Kernels& kernels, const ModelShape& shape, const PackedFeedback& feedback, int members,
                int most_rows = 1);

  int most_distance() const { return int(feedback_.distances.size()); }
  void begin_pass(int rows = 1);   // throws std::logic_error where there is no room for them
  // By every member: x [rows][hidden] += W[distance] norm(states [rows][hidden]); distance: 1 to most_distance().
  void pass(Team& team, int member, const float* states, int distance, float* x);

 private:
  const Kernels& kernels_;
  const PackedFeedback& feedback_;
  const float eps_;
  const int most_rows_;
  int rows_ = 0;                 // of the pass
  std::vector<Memory> inputs_;   // of each member
  Shares shares_;
};

class HeadStack {
 public:
  HeadStack(const Kernels& kernels, const ModelShape& shape, const PackedHead& head, const std::vector<int>& draft_ids,
            int members);

  void begin_pass(int rows);   // throws std::logic_error where there is no room for them
  // By every member: the LM head on the rows x [rows][hidden] that the sampler has been told of.
  void pass(Team& team, int member, const float* x, const Sampler& sampler);
  // The same, for rows that choose the tokens for these positions each in its own way, by the best score: `best` and
  // `strange` are the member's, as of LogitsPhase.
  void pass_side_by_side(Team& team, int member, const float* x, const int* positions, const RowChoice* each, Candidate* best,
                         uint8_t* strange);
  const int* draft_ids() const { return draft_ids_.empty() ? nullptr : draft_ids_.data(); }
  int outputs() const { return head_.lm_head.outputs; }

 private:
  void run(Team& team, int member, const float* x, LogitsPhase phase);

  const Kernels& kernels_;
  const PackedHead& head_;
  const std::vector<int>& draft_ids_;
  const float eps_;
  int rows_ = 0;                 // of the pass
  std::vector<Memory> inputs_;   // of each member
  Shares shares_;
};

}  // namespace ppsd
