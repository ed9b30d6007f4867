// One model on a CPU: stages, teams, and answers one at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "../pipeline/lockstep.h"
#include "../pipeline/planner.h"
#include "../pipeline/threads.h"
#include "stage.h"

namespace ppsd {

// What an answer is to be like.
struct Request {
  std::vector<int> prompt;
  Sampling sampling;
  Limits limits;
  Schedule schedule;
  std::shared_ptr<Successors> successors;   // of all answers, for schedules that recycle; or null
  std::shared_ptr<Planner> planner;   // `auto`: it chooses the schedule, round by round
  bool report_drafts = false;
  bool lock_step = false;   // even with overlap: the same rounds every time
  Ticks ticks;              // of the lock-step
  Oracle oracle;
  std::shared_ptr<Trace> trace;   // of an answer of the loop; or null
};

// The threads that work on one pass together, each on a core of its own where there are enough. Throws NoThread.
std::unique_ptr<Team> make_shared_team(int threads);

class CpuEngine {
 public:
  // Verification layers [E, L) are cut at `cuts` into stages that overlap with each other (PPSD); none: one stage.
  // Throws NoThread.
  CpuEngine(std::shared_ptr<const CpuModel> model, int threads, std::vector<int> cuts);

  int threads() const { return threads_; }
  const CpuModel& model() const { return *model_; }
  std::string pin_problem() const;   // one line about a thread that could not be pinned, or nothing

  // How many rows of `prompt` need not be run again; rows of an earlier answer's text stay where they are.
  int shared_rows(const std::vector<int>& prompt, int own = 0) const;
  // The logits after each of the `last` rows at the end of a text: [last][vocabulary].
  std::vector<float> logits(const std::vector<int>& ids, int last);
  // Of every id of a text but the first, by what stands before it, at temperature 1; and the `top` best there.
  std::vector<Logprobs> logprobs(const std::vector<int>& ids, int top);

  // For a Session: makes the stages ready, and gives each its team.
  Stages begin(const Request& request, int keep);
  void use_shared_team();
  void use_own_teams();
  void pin_stage(int stage) const;        // the calling thread, to the first core of the stage's own team
  void pin_shared() { shared_.pin_caller(); }
  // How many rows of the text have passed all layers; one that has passed half of them counts as a half. From any thread.
  int rows_done() const;
  const std::vector<int>& tokens() const { return tokens_; }   // of which rows are here, see shared_rows
  void remember(std::vector<int> tokens) { tokens_ = std::move(tokens); }

  CpuDraftStage& draft() { return draft_; }
  std::vector<std::unique_ptr<CpuVerifyStage>>& verify() { return verify_; }
  Team& shared_team() { return shared_; }
  void judge_by(const std::function<Team::Pass(int active)>& told);   // all teams, for tests
  void reserve(int capacity);

 private:
  Stages begin(const Request& request, int keep, int length);   // length: of the text whose rows are rotated as one
  int rotated_as(int length) const;   // the length, where it matters to the rotation; else 0
  void read(const std::vector<int>& ids, int last, const std::function<void(int row, const float* logits)>& told);

  std::shared_ptr<const CpuModel> model_;
  const int threads_;
  const std::unique_ptr<Team> shared_team_;
  Team& shared_;
  std::unique_ptr<Team> draft_team_;
  std::vector<std::unique_ptr<Team>> verify_teams_;
  CpuDraftStage draft_;
  std::vector<std::unique_ptr<CpuVerifyStage>> verify_;
  std::vector<float> rope_;
  int capacity_ = 0;
  int rotated_as_ = 0;        // see rotated_as; of the rows that are here
  std::vector<int> tokens_;   // what the stages' rows were computed from
};

}  // namespace ppsd
