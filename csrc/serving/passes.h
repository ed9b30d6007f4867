// Passes over the weights for rows of several texts, whose KV cache lies in blocks.
#pragma once

#include <memory>
#include <vector>

#include "../cpu/stage.h"

namespace ppsd {

class CpuEngine;

class Passes {
 public:
  // Throws NoThread.
  Passes(std::shared_ptr<const CpuModel> model, int threads);

  const CpuModel& model() const { return *model_; }
  Team& team() { return *team_; }
  int members() const { return team_->size(); }
  size_t block_bytes() const { return late_.end(); }
  bool hears() const { return feedback_.most_distance() > 0; }   // the exit head draws on verified rows too
  double draft_share() const;   // of the weights that all layers and the LM head read, those that a draft step reads
  void reserve(int rows);   // the longest text
  // What an engine of this model holds of its text, rows [0, rows), into blocks.
  void copy(CpuEngine& engine, int rows, uint8_t* const* blocks);

  // A draft token to be drawn from row `row` of a pass, for `position`.
  struct Draw {
    int row, position;
    const Feedback* feedback;   // or null
    Sampler* sampler;
    Draft draft;                // what comes of it
    EagleText* text = nullptr;  // of an EAGLE-3 head, and where its cache lies
    uint8_t* const* blocks = nullptr;
    int spans = 0;
  };
  // Layers [0, E) on x [rows][hidden], in place; then the exit head.
  void early(const std::vector<Segment>& segments, float* x, std::vector<Draw>* draws);
  void late(const std::vector<Segment>& segments, float* x);   // layers [E, L), in place
  // Of an EAGLE-3 head: what the rows of the last late pass are at its taps, from row `row` on; and how many numbers each has.
  const float* tapped(int row) const { return late_.tapped() + size_t(row) * tap_width(); }
  size_t tap_width() const { return eagle_ ? eagle_->tap_width() : 0; }
  void catch_up(EagleText* text, uint8_t* const* blocks, int spans) { eagle_->catch_up(*team_, text, blocks, spans); }
  std::vector<int> choose(const std::vector<Head::Row>& rows) { return choose(&head_, rows, false); }
  std::exception_ptr failure(const Sampler* sampler) const { return head_.failure(sampler); }

 private:
  const std::vector<int>& choose(Head* head, const std::vector<Head::Row>& rows, bool store);
  int distance(const Draw& draw) const;
  void feed(std::vector<Draw*>& draws);

  const std::shared_ptr<const CpuModel> model_;
  const std::unique_ptr<Team> team_;
  LayerStack early_, exit_;
  std::unique_ptr<EagleStack> eagle_;   // or null
  LayerStack late_;
  FeedbackStack feedback_;
  Head head_;
  std::unique_ptr<Head> exit_head_;
  std::vector<float> rope_;
  int capacity_ = 0;
  std::vector<float> exits_, drawn_from_, states_;   // [kPassRows][hidden]
};

}  // namespace ppsd
