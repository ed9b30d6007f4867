// The stages of one text, for a caller that writes the loop himself: ppsd_rt/stages.py checks what it hands over, and says
// what the calls mean.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../core/thread.h"
#include "blocks.h"
#include "exit_rows.h"
#include "model_backend.h"

namespace ppsd {

class TextStages {
 public:
  TextStages(std::unique_ptr<ModelBackend> passes, const Sampling& sampling);

  // A new text, of which the answer begins at this position; all rows are void. key: of its noise.
  void begin(int answer, uint64_t key);
  void reserve(int capacity);    // rows that are held stay
  // Rows `ids` from position `start` on through the early layers; draw: the exit head's token after the last of them, and
  // its probability.
  std::optional<std::pair<int, double>> draft(int start, const std::vector<int>& ids, bool draw);
  // Rows that draft() ran, through the verification layers: the model's own id after each of the `last` rows.
  std::vector<int> verify(int start, const std::vector<int>& ids, int last);
  void learn(int position);      // the verified row here is the newest committed one

 private:
  size_t hidden() const { return size_t(passes_->model().shape.hidden_size); }
  Segment segment(int start, int rows) { return blocks_->segment(start, rows, std::clamp(sampling_.answer - 1 - start, 0, rows)); }
  size_t kept_width() const { return hidden() + (passes_->model().eagle ? 0 : passes_->tap_width()); }
  void keep(int start, const float* states, int rows);
  void hear(int end);

  const std::unique_ptr<ModelBackend, NotAfterFork> passes_;
  std::unique_ptr<TextBlocks> blocks_;
  Sampling sampling_;
  Sampler drafting_, verifying_;
  DraftVocabulary vocabulary_;
  EagleText eagle_;
  ExitRows exits_;
  int headed_ = 0;                // rows that have passed the exit head's own layers
  std::optional<Feedback> heard_;
  // [rows from kept_from_ on][hidden], as the last layer left them, and behind each what it is at a tap; until one of them is learnt
  std::vector<float> kept_;
  int kept_from_ = 0;
};

}  // namespace ppsd
