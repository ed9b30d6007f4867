// Which answers draft how many tokens in a round, and which of these are copied.
//
// One rule for one answer and for forty: rows go where they earn most, by what passes take now (pass_times.h) and by how often
// drafts are right. A draft costs its row and its share of a draft step; both are worth the tokens that the round gives in that
// time anyway. docs/design/planner.md tells of it. A schedule that the caller names is kept as far as there are rows.
#pragma once

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "../core/protocol.h"
#include "../core/schedule.h"
#include "pass_times.h"

namespace ppsd {

// -- an allotment --
//
// How many drafts each answer is expected to have in a round. Pure arithmetic: the j-th draft of an answer with acceptance a is
// kept with chance a^j.

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

// All numbers of drafts that were tuned, and not derived.
struct DraftTuning {
  double prior_weight = 4.0;   // verdicts that the head file's acceptance counts as
  double fades = 0.98;         // what an answer's verdicts weigh after each further one,
  double pool_fades = 0.995;   // and those of all answers
  double pooled = 8.0;         // verdicts that those of all answers count as, for one of them
  double copies = 2.0;         // what a copy must promise over the price of its row: its chance is less well known
  double margin = 1.6;         // times what its passes take, a draft is taken to cost in company; alone, it does cost that
  double margin_over_ranks = 1.1;
  double least_chance = 0.02, sure_chance = 0.98;   // bounds of what a draft must promise

  double loss_share = 0.02;    // of an answer's plain steps, what its drafts may lose in all,
  int ahead = 48;              // of so many tokens before they are decoded
  double carried = 4.0;        // plain tokens that an answer alone begins with, at most, of what the one before it has gained
  double most_credit = 16.0;   // plain tokens
  int acquainted = 8;          // verdicts; until then a head is tried whenever that can be paid

  int plain_after = 64;        // drafting rounds before two plain ones say again what a plain one takes
  double disturbed = 1.6;      // times what was expected: a round that takes more waited for something else
  double probing = 0.015;      // share of the time that drafts may cost that are only tried
  int last_probe = 64;         // plain rounds before a draft is tried, at most, if a draft is cheap

  double worth_changing = 1.03;   // gain that makes up for a change between taking turns and overlapping
  double recent = 0.97;           // what a drafting round weighs after each further one; after a plain one 0.99;
  double another = 0.2;           // in the next answer
  double expected = 4.0;          // rounds that the expectation from passes and acceptance counts as, beside these
  int trial = 6;                  // rounds that overlapping is tried in
  int more_rarely = 3;            // times as many rounds before the next trial, or as long a stay
};
inline constexpr DraftTuning kDrafts;

// What the policy knows of one answer.
struct Drafting {
  bool automatic = false;   // the policy decides on drafts: of `asked`, `lookup` and `recycle` count
  Schedule asked;
  int pool = 0;             // answers that it learns from and teaches: greedy 0, sampled 1; -1: none
  double accepted = 0.0, judged = 0.0;           // drafts of the exit head, older ones counting less
  double credit = kDrafts.loss_share * kDrafts.ahead;   // plain tokens that its drafts may still lose
  int tokens = 0;                                // so far
  double row_price = 0.0, draft_price = 0.0;     // of the round at hand: what a copy and what a draft cost, in plain tokens
  bool alone = false;                            // in the round at hand: it is charged what its passes took
  bool overlaps = false;                         // it drafts while it is verified, if it is alone
  bool left_over = false;                        // rows that left before it ended overlapping are still under way
  std::chrono::steady_clock::time_point since{}; // the end of the round before, where it was alone
};

class Policy {
 public:
  // Where stages can overlap: nowhere, on threads of one process, or on ranks.
  enum class Stages { kNone, kThreads, kRanks };

  // drafts: the model has an exit head. draft_share: see PassTimes. prior: how often its drafts are right, as far as is known.
  Policy(bool drafts, double draft_share, double prior, Stages stages);

  // An answer that gets a row of its own in the round.
  struct Writer {
    Drafting* drafting;
    Schedule schedule;   // of the round: what comes of it
  };
  struct RoundBudget {
    int prompt_rows;
    int reading;   // answers whose prompts have these
    int left;      // rows that drafts may have in all
    bool alone;    // the only writer is the only answer
    bool idle;     // stages would have nothing to do, so that answers draft while they are verified
  };
  void plan(std::vector<Writer>* writers, const RoundBudget& pass);
  // A pass of the round took so long.
  void took(PassTime PassTimes::*kind, int rows, double seconds) { round_seconds_ += times.observe(kind, rows, seconds); }
  void took_steps(int steps, double seconds) {   // of one row each, together
    round_seconds_ += steps * times.observe(&PassTimes::draft, 1, seconds / steps);
  }
  // What a verdict says of drafts to come, and what those of the round have earned and cost. in_flight: rows are under way.
  void learn(Drafting* drafting, const Round& round, bool in_flight, std::chrono::steady_clock::time_point now);

  // What a later process begins with: numbers, as `learned` gave them; others are no matter.
  std::vector<double> learned() const;
  void know(const std::vector<double>& numbers);
  std::string explain() const;

  PassTimes times;   // the loop's own passes, as it measures them

 private:
  struct Rate {
    int rounds = 0;
    double tokens = 0.0, seconds = 0.0;
    double value() const { return seconds > 0.0 ? tokens / seconds : 0.0; }
  };
  struct Pool {
    double accepted, judged;
    int verdicts = 0;
  };

  double acceptance(const Drafting& drafting) const;
  double plain() const { return beside_passes_ * times.plain(); }   // seconds of a plain round of an answer alone
  int wanted(const Drafting& drafting, int most);
  Rate expected(double acceptance) const;
  Rate drafting_rate(double acceptance) const;
  int affordable(double credit, int own, int sharing, bool drawn) const;
  void keep_schedule(Writer* writer, const RoundBudget& pass, int left) const;
  void give(Writer* writer, int drafts, int copies, int own, int sharing) const;
  void charge(Drafting* drafting, const Round& round, bool overlapped, double seconds);
  void choose_arm(Drafting* drafting, int tokens, double seconds);

  const bool drafts_;
  const Stages stages_;
  Allotment allotment_;         // of the round
  double round_seconds_ = 0.0;  // of its passes, so far
  std::array<Pool, 2> pools_;
  // Of an answer alone:
  double carried_ = 0.0;        // credit of the last one
  double beside_passes_ = 0.0;  // times what its passes take, a plain round took; 0: there was none
  Rate drafting_;               // rounds with drafts of the exit head, in plain ones instead of seconds; older ones count less
  bool plain_round_ = false, probing_ = false, drafting_round_ = false;
  int since_plain_ = 0, plain_left_ = 0, since_probe_ = 0, probe_after_ = 0;
  std::array<Rate, 3> measured_;   // of an answer alone, in all: plain rounds, drafting ones, overlapped ones
  std::array<Rate, 2> rates_;   // of taking turns and of overlapping: of the last stay
  int wait_, stay_;             // rounds before overlapping is tried, and that it lasts before turns are
};

// The policy of answers that are alone, one after the other, where whole rounds are timed and not their passes: on a GPU, whose
// launches are queued ahead.
class AlonePolicy {
 public:
  // prior: how often drafts are right, as far as is known. overlaps: stages can.
  AlonePolicy(double prior, bool overlaps);

  // Before an answer. asked: of it `lookup` and `recycle` count. pool: see Drafting.
  void begin(const Schedule& asked, int pool);
  // After every round but the prompt's; seconds: since the round before. What to do next.
  const Schedule& after(const Round& round, double seconds);
  const Schedule& schedule() const { return schedule_; }
  std::string explain() const { return policy_.explain(); }

 private:
  void plan();

  Policy policy_;
  Drafting drafting_;
  Schedule schedule_;
  std::chrono::steady_clock::time_point now_{std::chrono::seconds(1)};   // of rounds alone
};

Schedule overlapped(bool ranks);   // what `auto` overlaps as

// A schedule that the loop can keep. overlap: it may draft while it is verified.
Schedule fitted(Schedule schedule, bool overlap);

}  // namespace ppsd
