// Passes on the C++ kernels, by a team of threads; the KV cache lies in the loop's own blocks.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "model_backend.h"

namespace ppsd {

class CpuPasses final : public ModelBackend {
 public:
  // keep: after so many layers, the hidden states of all rows are kept beside the KV cache. late: its late layers are here, and
  // not on other ranks.
  CpuPasses(std::shared_ptr<const CpuModel> model, std::unique_ptr<Team> team, const std::vector<int>& keep = {}, bool late = true);

  // Early layers and exit head are worked on by this one, which has no more members, from now on; null: by its own, as all layers.
  void use(Team* team) {
    team_ = team != nullptr ? team : own_team_.get();
    if (eagle_) eagle_->use(team_);
  }
  // Over ranks, between answers: with the exit head of this model, of the same sizes.
  void draft_with(std::shared_ptr<const CpuModel> model);
  size_t block_bytes() const override { return late_.end() + kSpan * kept_width_ * sizeof(uint16_t); }
  bool uses_feedback() const override { return drafting_->feedback.most_distance() > 0; }
  bool lags() const override { return drafting_->exit.size() > 0; }
  double draft_share() const override;
  void reserve(int rows, int rotated_as) override;
  const float* rope() const { return rope_.data(); }
  size_t late_begin() const { return late_.begin(); }   // of a block

  void embed(const int* ids, int rows, float* x) override;
  bool early(const std::vector<Segment>& segments, float* x, const Cancelled& cancelled) override;
  bool draw(std::vector<Draw>* draws, const Cancelled& cancelled) override;
  void prefill_head(const Segment& rows, const float* states) override;
  Chosen verify(const std::vector<Segment>& segments, float* x, const std::vector<Head::Row>& rows,
                const Cancelled& cancelled) override;
  void hear(const std::vector<Segment>& segments, const float* states, const float* taps) override;
  std::exception_ptr failure(const Sampler* sampler) const override { return head_->failure(sampler); }
  const float* tapped(int row) const override { return late_.tapped() + size_t(row) * tap_width(); }
  void read_taps(EagleText* text, uint8_t* const* blocks, int spans) override { eagle_->catch_up(text, blocks, spans); }
  std::vector<uint16_t> kept(uint8_t* const* blocks, int rows) const override;   // [rows][keep][hidden] bfloat16, before any norm

 private:
  int distance(const Draw& draw) const;
  const float* heard(const Draw& draw) const { return (draw.feedback->heard.empty() ? draw.feedback->hidden : draw.feedback->heard).data(); }
  void hear_feedback(const std::vector<Draw*>& draws);
  bool pass_exit(const std::vector<Segment>& segments, const Cancelled& cancelled);
  bool draw_at_once(const std::vector<Draw*>& draws, const Cancelled& cancelled);
  bool draw_by_eagle(const std::vector<Draw*>& draws);
  bool draw_in_parts(const std::vector<Draw*>& draws, const Cancelled& cancelled);
  void ask_head(const std::vector<Draw*>& draws);
  void keep_tapped(const std::vector<Segment>& segments);
  uint16_t* kept_at(uint8_t* const* blocks, int row) const;

  struct Drafting {
    Drafting(const CpuModel& model, int members);
    LayerStack early, exit;
    FeedbackStack feedback;
    std::unique_ptr<LayerStack> keys;   // of verified rows, in the place of the exit layer's; null: there is no tap
    std::vector<float> wide;            // [kPassRows][2 * hidden], which these read
    std::unique_ptr<Head> head;   // null: there are no drafts
  };

  Team* team_ = nullptr;      // at work
  std::unique_ptr<Drafting> drafting_;
  std::unique_ptr<CpuEagleStack> eagle_;   // or null
  LayerStack late_;
  const size_t kept_width_;   // of a row, in numbers
  std::unique_ptr<Head> head_;   // null: on another rank
  std::vector<float> rope_;
  int capacity_ = 0, rotated_as_ = 0;
  std::vector<float> exits_, drawn_from_, states_;   // [kPassRows][hidden]
};

}  // namespace ppsd
