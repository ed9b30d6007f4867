// The planner of `auto`: from measured stage costs and the running acceptance it predicts every schedule's speed and
// picks the best. Pure arithmetic: carriers tell it what each round committed and how long it took.
//
// Draft-then-verify with K drafts at acceptance a commits (1 - a^(K+1)) / (1 - a) tokens in K draft steps, one row
// through the early layers and a pass over K + 1 rows. Overlapped schedules have no such closed form: they are simulated
// at a grid of acceptances, and again when the text is twice as long.
//
// Drafts have to earn what they cost. The planner keeps an account in plain steps: every committed token is worth one,
// every round costs what it is predicted to take, its schedule's bias included, so the bound is as good as the costs are.
// What drafting may lose in all is 2 % of the tokens (and the share of 16 tokens may be spent at once), so a round drafts
// only as much as the account can pay if every draft is rejected (siblings are charged afterwards). A head of unknown
// quality is tried at a bounded cost, whatever its file says of it; one that is right pays for longer drafts at once.
//
// What rounds really take corrects this in two ways. The machine's pace changes from moment to moment and is common to
// all schedules; a schedule's bias is how much longer than predicted it takes than plain decoding does in the same
// moments. So that there are such moments, plain rounds are put in while drafting, and drafts while decoding plainly.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "costs.h"
#include "protocol.h"
#include "tuning.h"

namespace ppsd {

// What a schedule is expected to do.
struct Prediction {
  enum class Mode { kPlain, kTurns, kOverlap };
  Mode mode = Mode::kPlain;
  int length = 0;                  // kTurns: drafts a round; kOverlap: which of overlapped_schedules()
  double tokens_per_second = 0.0;
};

class Planner {
 public:
  // prior: the acceptance to begin with, which counts as much as a few verdicts; NaN: not known.
  // lookup: of the schedules, where drafts may be copied; copies are neither counted nor foreseen, they come on top.
  // recycle: likewise.
  // siblings: of drafts may be verified.
  Planner(const Costs& costs, double prior, int lookup = 0, bool siblings = false, bool recycle = false);

  // Before the first round of an answer: how long its prompt is. What earlier answers gained counts little for this one.
  void begin(int context);
  // After every round but the prompt's; seconds: since the round before. What to do next.
  // left_over: its rows had left before overlapping ended.
  const Schedule& after(const Round& round, double seconds, bool left_over = false);
  const Schedule& schedule() const { return schedule_; }

  double acceptance() const { return accepted_ / (accepted_ + rejected_); }
  // Plain steps that drafts of this answer may still lose: what they have gained, and the share that is allowed.
  double credit() const { return credit_; }
  const Costs& costs() const { return costs_; }
  Prediction predict_plain() const;
  Prediction predict_turns(int length, double acceptance) const;
  Prediction predict_overlap(double acceptance) const;
  std::vector<Prediction> predictions() const;   // at the present acceptance, corrections included: all of the above

  // What was measured, by mode: rounds, tokens, seconds, and what had been predicted for those tokens.
  struct Measured {
    int rounds = 0, tokens = 0;
    double seconds = 0.0, predicted_seconds = 0.0;
  };
  const Measured& measured(Prediction::Mode mode) const { return measured_[int(mode)]; }

 private:
  void move_to(int context);
  double simulated(int which, int i) const;
  Prediction predict_overlap(int which, double acceptance) const;
  void learn(const Round& round, double seconds);
  bool learn_verdicts(const Round& round);
  void learn_left_over(const Round& round);
  void decide();
  Prediction best_turns(double acceptance, int most) const;
  void correct(double ratio);
  void account(Prediction::Mode mode, int tokens, double seconds);
  bool drifted() const;
  bool pays(double seconds, double credit) const;
  int affordable_drafts() const;
  bool affordable_overlap(int which) const;
  double overlapped_seconds(const Round& round);
  Prediction best_overlap(double acceptance) const;
  int affordable_copies() const;
  double corrected(Prediction::Mode mode, double seconds) const { return seconds * pace_ * bias_[int(mode)]; }

  const Costs measured_costs_;
  Costs costs_;                                // at the present length of the text
  const int lookup_;
  const bool recycle_;
  const bool siblings_;
  double accepted_, rejected_;                 // verdicts, older ones counting less
  double rescued_ = 0.0;                       // of the rounds of drafts, older ones counting less
  int verdicts_ = 0;                           // on drafts of the exit head, in all
  double credit_ = 0.0;
  int tokens_ = 0;                             // of this answer
  // Tokens per second of the overlapped schedules at acceptance 0, 1 / kGrid, ..., 1 (0: not simulated yet): for texts of
  // StageCosts::kContext rows, of twice as many, and so on.
  static constexpr int kGrid = 20;
  const bool ranks_;                           // stages are processes: they begin and end to overlap at no cost
  const std::vector<Schedule> overlaps_;
  using Simulated = std::vector<std::array<double, kGrid + 1>>;   // of each of them
  mutable std::vector<Simulated> simulated_;
  size_t doubled_ = 0;                         // which of them is that of the present length
  int overlap_ = 0;                            // the overlapped schedule that is the best
  double restarts_ = 1.0;                      // that the next overlapped round begins with: its pipeline is empty
  double pace_ = 1.0;                          // measured over predicted seconds, of all modes
  std::array<double, 3> bias_{1, 1, 1};        // by mode: the same, over plain decoding's; plain decoding's stays 1
  std::array<double, 3> recent_{1, 1, 1};      // by mode: measured over predicted seconds of its last rounds
  std::array<int, 3> sampled_{-1000, -1000, -1000};   // by mode: the last round of it
  std::array<int, 3> compared_{};              // by mode: how often its bias has been learned from
  int round_ = 0, switched_ = -1000;
  double pace_before_ = 1.0;                   // the last change of mode
  Prediction::Mode last_mode_ = Prediction::Mode::kPlain;
  std::array<Measured, 3> measured_{};
  Prediction::Mode mode_ = Prediction::Mode::kPlain;
  Schedule schedule_;
  bool probing_ = false;                       // this round is not what seems best, but tells something
  int probe_left_ = 0;                         // rounds of this probe, with the one at hand
  Prediction::Mode beside_ = Prediction::Mode::kPlain;   // what seems best, and the probe is held against
  int since_probe_ = 0, first_probe_, probe_after_, rounds_in_mode_ = 0;
  int overlapped_stay_;                        // overlapped rounds after which others are tried again
  int apart_;                                  // rounds between two changes, at least
};

// Those that a planner chooses from: one machine overlaps as `elastic` does.
std::vector<Schedule> overlapped_schedules(bool ranks);

}  // namespace ppsd
