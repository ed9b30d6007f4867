// The stages of one text, for a caller that writes the loop himself: ppsd_rt/stages.py checks what it hands over, and says
// what the calls mean.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine.h"

namespace ppsd {

class TextStages {
 public:
  TextStages(std::shared_ptr<const CpuModel> model, int threads, const Sampling& sampling);

  // A new text, of which the answer begins at this position; all rows are void. key: of its noise.
  void begin(int answer, uint64_t key);
  void reserve(int capacity);    // rows that are held stay
  // Rows `ids` from position `start` on through the early layers; draw: the exit head's token after the last of them, and
  // its probability.
  std::optional<std::pair<int, double>> draft(int start, std::vector<int> ids, bool draw);
  // Rows that draft() ran, through the verification layers: the model's own id after each of the `last` rows.
  std::vector<int> verify(int start, const std::vector<int>& ids, int last);
  void learn(int position);      // the verified row here is the newest committed one

 private:
  bool hears() const { return !model_->exit_feedback.distances.empty(); }
  void keep(const Chunk& chunk);

  const std::shared_ptr<const CpuModel> model_;
  Sampling sampling_;
  std::unique_ptr<CpuEngine, NotAfterFork> engine_;   // for its stages, caches and threads: it decodes nothing by itself
  std::shared_ptr<const Feedback> heard_;
  std::vector<float> kept_;   // [rows from kept_from_ on][hidden], as the last layer left them; until one of them is learnt
  int kept_from_ = 0;
};

}  // namespace ppsd
