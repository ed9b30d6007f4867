// The stages of a model for one text, with teams: what is measured and scored by. Answers are the loop's (../decoding/loop.h).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../pipeline/carrier.h"
#include "stage.h"
#include "team.h"

namespace ppsd {

// The threads that work on one pass together, each on a core of its own where there are enough. Throws NoThread.
std::unique_ptr<Team> make_shared_team(int threads);

class CpuEngine {
 public:
  CpuEngine(std::shared_ptr<const CpuModel> model, int threads);   // throws NoThread

  int threads() const { return threads_; }
  const CpuModel& model() const { return *model_; }
  std::string pin_problem() const;   // one line about a thread that could not be pinned, or nothing

  // How many rows of a text that is scored need not be run again.
  int shared_rows(const std::vector<int>& ids) const;
  // The logits after each of the `last` rows at the end of a text: [last][vocabulary].
  std::vector<float> logits(const std::vector<int>& ids, int last);
  // Of every id of a text but the first, by what stands before it, at temperature 1; and the `top` best there.
  std::vector<Logprobs> logprobs(const std::vector<int>& ids, int top);

  // Rows [0, keep) stay. end: of the text, for which there is room then; length: of what is rotated as one, see make_rope.
  void begin(const Sampling& sampling, int end, int keep = 0, int length = 0);
  void reserve(int capacity);
  void use_shared_team();
  void use_own_teams();                   // drafting has one thread, verification the others
  void pin_stage(int stage);              // the calling thread, to the first core of the stage's own team; 0: drafting

  CpuDraftStage& draft() { return draft_; }
  CpuVerifyStage& verify() { return verify_; }
  Stages stages() { return {&draft_, {&verify_}}; }
  Team& shared_team() { return *shared_team_; }

 private:
  void read(const std::vector<int>& ids, int last, const std::function<void(int row, const float* logits)>& told);

  const std::shared_ptr<const CpuModel> model_;
  const int threads_;
  const std::unique_ptr<Team> shared_team_;
  Team draft_team_, verify_team_;
  CpuDraftStage draft_;
  CpuVerifyStage verify_;
  std::vector<float> rope_;
  int capacity_ = 0;
  int rotated_as_ = 0;        // see Rotary::matters; of the rows that are here
  std::vector<int> tokens_;   // what the stages' rows were computed from
};

}  // namespace ppsd
