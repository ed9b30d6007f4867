// Stages on a CPU: the model cut at the exit layer, each part worked on by a team of threads.
#pragma once

#include <memory>
#include <vector>

#include "eagle.h"
#include "heads.h"
#include "layers.h"
#include "own_blocks.h"

namespace ppsd {

// All that is read-only: weights, vocabulary, rotary frequencies. Shared by the stages of one model.
struct CpuModel {
  const Kernels* kernels;
  ModelShape shape;
  Format format;
  Stored kv;
  Tensor embedding, lm_head;           // [vocabulary][hidden], where the checkpoint has them; tied: the same
  Rotary rotary;
  std::vector<PackedLayer> layers;
  PackedHead head;                     // the final norm, and the whole LM head
  // The exit head; without one nothing is drafted, and all layers verify. exit_layer 0: it reads the embeddings.
  int exit_layer = 0;
  std::vector<PackedLayer> exit_layers;
  PackedFeedback exit_feedback;
  PackedHead exit_head;                // its matrix may be `head`'s
  std::shared_ptr<const Eagle> eagle;  // or this, which reads what all layers make of the text
  std::vector<int> draft_ids;          // or empty: the whole vocabulary
  Tensor draft_rows;                   // the LM head whose rows are drafted with for ids of the text; or not present
  std::vector<std::shared_ptr<const Memory>> memory;   // what the matrices lie in; models with other heads share it
  size_t packed_bytes = 0;

  const PackedHead& drafting_head() const { return eagle ? eagle->head : exit_head; }
  bool drafts() const { return !drafting_head().norm.empty(); }
  DraftVocabulary draft_vocabulary() const;   // that a text begins with
};

std::vector<const PackedLayer*> pointers(const std::vector<PackedLayer>& layers, int first, int last);
void embed(const Tensor& table, int id, float* row);   // row [hidden]

// For benchmarks: what is drafted at position p is `truth[p]` with probability `acceptance`, else another id; second: the
// chance that the second choice is right then. The work of drafting is done all the same.
struct Oracle {
  std::vector<int> truth;
  double acceptance = 1.0, second = 0.0;
  uint64_t seed = 0;
};
Draft foreseen(const Oracle& oracle, Draft draft, int position, int vocab_size);   // the oracle's, where it has one

// Stages of one text with a KV cache of its own, without siblings: for measuring and for scoring.
class CpuDraftStage final : public DraftStage {
 public:
  CpuDraftStage(const CpuModel& model, int members);

  void use(Team* team) {
    team_ = team;
    if (eagle_) eagle_->use(team);
  }
  void reserve(int capacity, const float* rope);
  int length() const { return length_; }
  void begin(const Sampling& sampling, int kept);   // a new answer that shares the first `kept` rows
  const OwnBlocks& blocks() const { return blocks_; }

  bool step(const DraftStep& step, Draft* draft, const Cancelled& cancelled) override;
  void export_hidden(Chunk* chunk) override;

  // Of an EAGLE-3 head, which reads taps: what verification tells it, in the turn of that stage.
  EagleText* text() { return eagle_ ? &text_ : nullptr; }
  const EagleText* text() const { return eagle_ ? &text_ : nullptr; }
  void catch_up() { eagle_->catch_up(&text_, blocks_.pointers(), blocks_.size()); }

 private:
  bool run_rows(const int* ids, int rows, const Cancelled& cancelled);
  bool draw(const DraftStep& step, Draft* draft, const Cancelled& cancelled);
  void choose(Draft* draft);
  Segment segment(int start, int rows) const { return {rows, start, blocks_.pointers(), blocks_.size()}; }

  const CpuModel& model_;
  Team* team_ = nullptr;
  const float* rope_ = nullptr;
  int most_ = 0;                         // rows that are reserved; the caches grow up to them
  LayerStack early_, late_;              // layers [0, E), and the exit head's own
  std::unique_ptr<CpuEagleStack> eagle_;    // or null
  EagleText text_;
  OwnBlocks blocks_;                     // of all
  FeedbackStack feedback_;
  std::unique_ptr<Head> head_;
  DraftVocabulary vocabulary_;
  Sampler sampler_;
  int length_ = 0;                       // rows that have passed the early layers
  int head_length_ = 0;                  // and the exit head's own
  Memory exit_hidden_;                   // [capacity][hidden]
  std::vector<float> x_;                 // [kPassRows][hidden]
};

class CpuVerifyStage final : public VerifyStage {
 public:
  // Layers [first, last); the last stage also has the final norm and the LM head.
  CpuVerifyStage(const CpuModel& model, int first, int last, int members);

  void use(Team* team) { team_ = team; }
  void tell(CpuDraftStage* draft);       // all layers are this stage's: the draft stage reads what they leave at the taps
  void reserve(int capacity, const float* rope);
  int length() const { return length_; }
  LayerStack& stack() { return layers_; }     // for rows of other texts,
  Head* head() { return head_.get(); }        // and for what they choose; null: not the last stage
  void begin(const Sampling& sampling, int kept);
  // To time what comes after rows that nobody has computed.
  void pretend(int length) { length_ = length; }
  void fill() {
    blocks_.hold(most_, most_);
    blocks_.fill();
  }
  const OwnBlocks& blocks() const { return blocks_; }

  bool run(Chunk* chunk, const Cancelled& cancelled) override;
  std::vector<int> choose(const Chunk& chunk, int last) override;
  // The logits after every row of a chunk of at most kPassRows, [rows][vocabulary], until the next choice. Throws
  // std::runtime_error where one is NaN or infinite.
  const float* logits(const Chunk& chunk);

 private:
  // positions: those that the rows choose the tokens for.
  std::vector<int> choose_rows(const float* x, const std::vector<int>& positions, bool store);

  const CpuModel& model_;
  Team* team_ = nullptr;
  const float* rope_ = nullptr;
  int most_ = 0;                         // as of the draft stage
  LayerStack layers_;
  CpuDraftStage* told_ = nullptr;        // or null
  OwnBlocks blocks_;
  std::unique_ptr<Head> head_;
  std::unique_ptr<Sampler> sampler_;
  int length_ = 0;
};

}  // namespace ppsd
