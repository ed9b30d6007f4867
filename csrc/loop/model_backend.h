// Passes over the weights for rows of several texts, whose KV cache lies in blocks: what the loop asks of a backend.
//
// The loop decides what runs; a body computes. CpuPasses (cpu_passes.h) has the C++ kernels, and csrc/bindings/passes.cpp asks
// Python. The bits of a row may not depend on the rows that share its pass.
#pragma once

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../cpu/checkpoint.h"

namespace ppsd {

class Blocks;

class ModelBackend {
 public:
  // model: what all bodies have of it are its sizes, rotations, draft ids and taps; the kernels are the samplers'.
  ModelBackend(std::shared_ptr<const CpuModel> model, std::unique_ptr<Team> team) : model_(std::move(model)), own_team_(std::move(team)) {}
  virtual ~ModelBackend() = default;

  const CpuModel& model() const { return *model_; }
  Team& team() const { return *own_team_; }
  int members() const { return own_team_->size(); }
  virtual size_t block_bytes() const = 0;                // of the loop's memory
  virtual void lie_in(Blocks*) {}                        // once: those that the loop hands out
  virtual bool drafts() const { return model_->drafts(); }
  virtual DraftVocabulary draft_vocabulary() const { return model_->draft_vocabulary(); }
  virtual bool uses_feedback() const = 0;                // the exit head draws on verified rows too
  virtual bool lags() const = 0;                         // the exit head has layers of its own, see draw
  virtual double draft_share() const = 0;   // of the weights that all layers and the LM head read, those that a draft step reads
  // Have rows other bits as a prompt's (Segment::prompt) than where decoding made them? Then texts share those of prompts alone.
  virtual bool decoded_rows_differ() const { return false; }
  // The longest text; and as what its rows are rotated, see make_rope: all texts that run are rotated alike.
  virtual void reserve(int, int) {}

  virtual void embed(const int* ids, int rows, float* x) = 0;   // throws std::runtime_error for a damaged embedding
  // Layers [0, E) on x [rows][hidden], in place. False: cancelled on the way.
  virtual bool early(const std::vector<Segment>& segments, float* x, const Cancelled& cancelled = nullptr) = 0;

  // A draft token, drawn from the last row of `rows`: those that have not passed the exit head's own layers.
  struct Draw {
    Segment rows;
    const float* states;        // [rows][hidden], after the early layers
    const Feedback* feedback;   // or null
    Sampler* sampler;
    const DraftVocabulary* vocabulary;
    EagleText* text;            // of an EAGLE-3 head
    Draft draft;                // what comes of it
    std::vector<float> drawn;   // [hidden]: its last row and what that has heard, for a head with a tap, see hear
    int position() const { return rows.start + rows.rows; }
  };
  // Of several texts at once. False: cancelled on the way.
  virtual bool draw(std::vector<Draw>* draws, const Cancelled& cancelled = nullptr) = 0;
  virtual void prefill_head(const Segment&, const float*) = 0;   // through the exit head's own layers, for drafts to come

  // Layers [E, L) on x [rows][hidden], in place, and the tokens that some of these rows choose.
  struct Chosen {
    bool done = true;               // false: cancelled on the way
    double late = 0.0, choose = 0.0;   // seconds
    std::vector<int> ids;
  };
  virtual Chosen verify(const std::vector<Segment>&, float*, const std::vector<Head::Row>&, const Cancelled& = nullptr) = 0;
  virtual std::exception_ptr failure(const Sampler*) const = 0;   // of its grammar, in the last `verify`; or null
  // What rows of several texts are at the tap of a head of the kind `feedback`, [rows][hidden], once they are verified: their keys and
  // values in its layer are made anew. states: Draw::drawn, or as they left the early layers where nothing was drawn from them.
  virtual void hear(const std::vector<Segment>&, const float*, const float*) = 0;
  // What the rows of the last verification are at the head's taps, from row `row` on; and how many numbers each has.
  virtual const float* tapped(int) const = 0;
  size_t tap_width() const { return size_t(taps()) * size_t(model_->shape.hidden_size); }
  int taps() const { return int(model_->taps().size()); }
  virtual void read_taps(EagleText*, uint8_t* const*, int) = 0;
  // What is kept of a text's rows [0, rows), for distillation; or nothing.
  virtual std::vector<uint16_t> kept(uint8_t* const*, int) const { return {}; }

 protected:
  static void take(Draw* draw, int chosen);   // a draft token, from the logits of its row

  std::shared_ptr<const CpuModel> model_;
  const std::unique_ptr<Team> own_team_;
};

}  // namespace ppsd
