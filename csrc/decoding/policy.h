// Which answers draft how many tokens in a round, which of these are copied, and whether they have siblings.
//
// A schedule that the caller names is kept as far as there are rows. An answer of `auto` that runs alone is steered by its
// Planner, which knows what stages cost here; among others it gets what `allot` gives it, by what passes have taken lately.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "../pipeline/planner.h"
#include "pass_times.h"

namespace ppsd {

// -- an allotment --
//
// How many drafts each answer has in a round: rows go where they earn most. Pure arithmetic.
//
// The j-th draft of an answer with acceptance a is kept with chance a^j. It costs a row of the verification pass, and its
// share of a draft step that all answers with so many drafts make together. Both are worth the tokens that the round gives
// in this time anyway: long drafts are given where one answer is alone, and none where rows are dear.

struct Allotment {
  std::vector<int> drafts;          // of each answer
  double tokens_per_second = 0.0;   // that the round is expected to give: what a second is worth
  double row_seconds = 0.0;         // of a copy's row in the verification pass, where that is dearest
  double draft_seconds = 0.0;       // of one draft more, its row included
  bool copies = false;              // does a copy's row cost less than the token that it may bring?
};

// While prompts are read, a draft delays the answers that wait for theirs as well: a second is worth no less than what all
// of them give once they write.
//
// acceptance: of each answer that may have drafts. others: rows of the pass besides, of which `writing` are answers' own.
// left: rows that drafts may have in all; most: of one answer. reading: answers whose prompts have rows in the pass.
// copying: answers that may copy. How many find something nobody knows yet: the first row may begin a group of the kernels
// that costs as much as four, and the fifth another one.
Allotment allot(const PassTimes& times, const std::vector<double>& acceptance, int others, int writing, int left, int most,
                int reading, int copying);

// -- the policy --

// All numbers of drafts under load that were tuned, and not derived.
struct LoadTuning {
  double prior_acceptance = 0.6, prior_weight = 4.0;   // before anything is known, and the verdicts that it counts as
  double fades = 0.99;       // what verdicts weigh after each further one
  double pooled = 8.0;       // verdicts that those of all answers count as, for one of them
  // A round with drafts takes longer than its passes say, and their rows are not there for prompts. Without a margin `auto`
  // had 1.02, 0.93, 0.95, 0.89 of plain batching with 4, 8, 16, 32 clients; with this one 0.99, 0.98, 0.99, 0.96
  // (benchmarks/results/2026-11-23-amd-epyc-load.json, and -before).
  double margin = 2.0;
  // Over ranks what is measured is the whole way of a pass, and prompts have passes of their own.
  double margin_over_ranks = 1.1;
  double overdraft = 0.5;    // plain tokens that an answer's drafts may lose at once,
  double loss_share = 0.02;  // and in all, of its tokens
  int copies = 6;            // copied drafts of a round, at the most
  double least_chance = 0.1, sure_chance = 0.98;   // bounds of what a draft must promise
};

// What the policy knows of one answer.
struct Drafting {
  bool automatic = false;             // the policy decides on drafts: of `asked`, `lookup` and `recycle` count
  Schedule asked;
  std::shared_ptr<Planner> planner;   // of `auto`, for when it is alone; or null
  double accepted = 0.0, judged = 0.0;   // drafts of the exit head, older ones counting less
  double row_price = 0.0, draft_price = 0.0;   // of the round at hand: what a copy and what a draft cost, in plain tokens
  double balance = 0.0;               // plain tokens that drafts have earned, more than they cost
  bool steered = false;               // by its planner, in the round at hand
  bool left_over = false;             // rows that left before its planner ended overlapping are still under way
  std::chrono::steady_clock::time_point since;   // the end of the round before, where it was steered
};

class Policy {
 public:
  // drafts: the model has an exit head. draft_share: see PassTimes.
  Policy(bool drafts, double draft_share, bool over_ranks = false);

  // An answer that gets a row of its own in the round.
  struct Writer {
    Drafting* drafting;
    int text, written;   // tokens: of the text, and of these of the answer
    Schedule schedule;   // of the round: what comes of it
  };
  struct Pass {
    int prompt_rows;
    int reading;   // answers whose prompts have these
    int left;      // rows that drafts may have in all
    bool alone;    // the only writer is the only answer
    bool idle;     // stages would have nothing to do, so that answers draft while they are verified
  };
  void plan(std::vector<Writer>* writers, const Pass& pass);
  // What a verdict says of drafts to come, and what those of the round have earned and cost. in_flight: rows are under way.
  void learn(Drafting* drafting, const Round& round, bool in_flight);

  PassTimes times;   // the loop's own passes, as it measures them

 private:
  bool steer(Writer* writer, bool idle);
  double earned(const Writer& writer) const;
  void keep_schedule(Writer* writer, const Pass& pass, int left) const;
  void give(Writer* writer, int drafts, int copies) const;

  const LoadTuning tuning_;
  const bool drafts_;
  Allotment allotment_;                    // of the round
  double accepted_ = 0.0, judged_ = 0.0;   // drafts of exit heads, of all answers, older ones counting less
};

// A schedule that the loop can keep. siblings: it may have some, for the answer has a pass to itself. overlap: it may draft
// while it is verified.
Schedule fitted(Schedule schedule, bool siblings, bool overlap);

}  // namespace ppsd
