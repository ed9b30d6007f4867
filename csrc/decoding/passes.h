// Passes over the weights for rows of several texts, whose KV cache lies in blocks.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../cpu/stage.h"

namespace ppsd {

struct Request;

class Passes {
 public:
  // keep: after so many layers, the hidden states of all rows are kept beside the KV cache. late: its late layers are here, and
  // not on other ranks.
  Passes(std::shared_ptr<const CpuModel> model, std::unique_ptr<Team> team, const std::vector<int>& keep = {}, bool late = true);
  virtual ~Passes() = default;

  const CpuModel& model() const { return *model_; }
  Team& team() { return *own_team_; }
  int members() const { return own_team_->size(); }
  // Early layers and exit head are worked on by this one, which has no more members, from now on; null: by its own, as all layers.
  void use(Team* team) { team_ = team != nullptr ? team : own_team_.get(); }
  size_t block_bytes() const { return late_.end() + kSpan * kept_width_ * sizeof(uint16_t); }
  virtual bool drafts() const { return model_->drafts(); }
  virtual bool uses_feedback() const { return feedback_.most_distance() > 0; }   // the exit head draws on verified rows too
  // Does it hold the rows of one text, whatever blocks say? Then it hears of every answer that begins, and what it keeps.
  virtual bool one_text() const { return false; }
  virtual int held() const { return 0; }   // of that text, rows that a later one may begin with
  virtual void begin(const Request&, int) {}   // and what it keeps of the rows: see held
  bool lags() const { return exit_.size() > 0; }   // the exit head has layers of its own, see draw
  double draft_share() const;   // of the weights that all layers and the LM head read, those that a draft step reads
  // The longest text; and as what its rows are rotated, see make_rope: all texts that run are rotated alike.
  void reserve(int rows, int rotated_as);
  const float* rope() const { return rope_.data(); }
  size_t late_begin() const { return late_.begin(); }   // of a block

  virtual void embed(const int* ids, int rows, float* x);   // throws std::runtime_error for a damaged embedding
  // Layers [0, E) on x [rows and siblings][hidden], in place. siblings: of an only segment. False: cancelled on the way.
  virtual bool early(const std::vector<Segment>& segments, float* x, const std::vector<Sibling>& siblings = {},
                     const Cancelled& cancelled = nullptr);

  // A draft token, drawn from the last row of `rows`: those that have not passed the exit head's own layers.
  struct Draw {
    Segment rows;
    const float* states;        // [rows][hidden], after the early layers
    const Feedback* feedback;   // or null
    Sampler* sampler;
    const DraftVocabulary* vocabulary;
    double sibling_bar;         // above 0: the second choice too, if it can be as probable
    EagleText* text;            // of an EAGLE-3 head
    Draft draft;                // what comes of it
    int position() const { return rows.start + rows.rows; }
  };
  // Of several texts at once. False: cancelled on the way.
  virtual bool draw(std::vector<Draw>* draws, const Cancelled& cancelled = nullptr);
  void catch_up(const Segment& rows, const float* states);   // through the exit head's own layers, for drafts to come

  // Layers [E, L) on x [rows and siblings][hidden], in place, and the tokens that some of these rows choose.
  struct Chosen {
    bool done = true;               // false: cancelled on the way
    double late = 0.0, choose = 0.0;   // seconds
    std::vector<int> ids;
  };
  Chosen verify(const std::vector<Segment>& segments, float* x, const std::vector<Sibling>& siblings,
                const std::vector<Head::Row>& rows, const Cancelled& cancelled = nullptr);
  // Of the rows [0, rows) of a text: [rows][keep][hidden] bfloat16, before any norm.
  std::vector<uint16_t> kept(uint8_t* const* blocks, int rows) const;
  // Of an EAGLE-3 head: what the rows of the last verification are at its taps, from row `row` on; and how many numbers each has.
  const float* tapped(int row) const { return late_.tapped() + size_t(row) * tap_width(); }
  size_t tap_width() const { return eagle_ ? eagle_->tap_width() : 0; }
  int taps() const { return eagle_ ? int(model_->eagle->taps.size()) : 0; }
  void read_taps(EagleText* text, uint8_t* const* blocks, int spans) { eagle_->catch_up(*team_, text, blocks, spans); }
  std::exception_ptr failure(const Sampler* sampler) const { return head_->failure(sampler); }

  // Of the two rows there, the sibling's now is the text's. late: in its late layers too.
  void adopt(int position, uint8_t* const* blocks, bool late);

 private:
  int distance(const Draw& draw) const;
  bool pass_exit(const std::vector<Segment>& segments, const Cancelled& cancelled);
  bool draw_at_once(const std::vector<Draw*>& draws, const Cancelled& cancelled);
  bool draw_by_eagle(const std::vector<Draw*>& draws);
  bool draw_in_parts(const std::vector<Draw*>& draws, const Cancelled& cancelled);
  void ask_head(const std::vector<Draw*>& draws);
  void take(Draw* draw, int chosen) const;
  void keep_tapped(const std::vector<Segment>& segments);
  uint16_t* kept_at(uint8_t* const* blocks, int row) const;

  const std::shared_ptr<const CpuModel> model_;
  const std::unique_ptr<Team> own_team_;
  Team* team_;                // at work
  LayerStack early_, exit_;
  std::unique_ptr<EagleStack> eagle_;   // or null
  LayerStack late_;
  const size_t kept_width_;   // of a row, in numbers
  FeedbackStack feedback_;
  std::unique_ptr<Head> head_;   // null: on another rank
  std::unique_ptr<Head> exit_head_;
  std::vector<float> rope_;
  int capacity_ = 0, rotated_as_ = 0;
  std::vector<float> exits_, drawn_from_, states_;   // [kPassRows][hidden]
};

}  // namespace ppsd
