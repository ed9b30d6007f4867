// What draft steps, verification passes and messages cost: the table that calibrations fill. The planner and the
// simulation work with it; nothing else says what a stage costs.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "schedule.h"

namespace ppsd {

// Seconds by the number of rows, from 1 on.
class RowTable {
 public:
  static constexpr int kMost = 64;   // rows

  RowTable() = default;
  explicit RowTable(std::vector<double> seconds) : seconds_(std::move(seconds)) {}
  // Straight lines between the numbers of rows that were measured, the last one's seconds after them: of 1 to `rows`
  // rows. Fewer rows never cost more, whatever the moments in which they were measured.
  static RowTable between(std::map<int, double> measured, int rows = kMaxRows);

  // More rows than the table has: as its last ones go on.
  double operator()(int rows) const {
    const int size = this->size();
    if (rows <= size) return seconds_[size_t(rows) - 1];
    return seconds_.back() + (rows - size) * (size > 1 ? seconds_.back() - seconds_[size_t(size) - 2] : 0.0);
  }
  int size() const { return int(seconds_.size()); }
  bool empty() const { return seconds_.empty(); }
  const std::vector<double>& seconds() const { return seconds_; }
  bool operator==(const RowTable& other) const { return seconds_ == other.seconds_; }

 private:
  std::vector<double> seconds_;
};

// A verification stage: its passes after kContext rows of text, and what each further row of the text adds to them.
struct PassCosts {
  RowTable seconds, deeper;   // deeper: as many rows, or empty: nothing
  bool operator==(const PassCosts& other) const { return seconds == other.seconds && deeper == other.deeper; }
};

// Seconds of a draft stage, of the verification stages after it and of the messages between them: one machine, or ranks.
// Of one model, its format, exit head and thread count, after a text of kContext rows.
struct StageCosts {
  static constexpr int kContext = 128;

  double row_step = 0.0;         // a row through the early layers, after another step
  double draft_step = 0.0;       // the same and the exit head
  RowTable steps;                // so many rows through the early layers; empty: each takes row_step
  std::vector<PassCosts> verify; // of each verification stage, in a pass after drafts; the last one's has the choice of tokens
  // After a pass, the draft stage's weights are no longer in the cache; and where nothing is drafted, more of the other
  // weights are. 0: no difference.
  double first_draft = 0.0;      // the first draft of a round
  double plain = 0.0;            // a row and its pass, again and again
  // What each further row of the text adds to a step. (Attention is arithmetic: it costs by the row of the pass, where
  // the weights hardly do.)
  double step_deeper = 0.0;
  std::vector<double> links;     // a message on its way to each verification stage, and the verdict's; empty: they take no time
  double link_row = 0.0;         // more for each row of a message: what its hidden states take at the link's bandwidth
  // How many times longer a draft step takes while verification works, and the other way round.
  double draft_interference = 1.0, verify_interference = 1.0;

  int stages() const { return int(verify.size()); }             // of verification
  StageCosts after(int context) const;                          // the same costs after a text of so many rows
  double pass(int rows) const;                                  // through all verification stages and links
  double plain_step() const { return plain > 0.0 ? plain : row_step + pass(1); }
  // A round in turns: so many drafts, the last one's row, and the pass; without drafts, a plain step with copies.
  double round(int drafts, int rows) const {
    if (drafts == 0) return plain_step() + pass(rows) - pass(1);
    return (first_draft > 0.0 ? first_draft : draft_step) + (drafts - 1) * draft_step + row_step + pass(rows);
  }
  // A step of the draft stage: so many rows, or none, and perhaps a draft.
  double step(int rows, bool draw) const;
  // Seconds of a draft in a round of so many, on average, in plain steps.
  double draft_share(int drafts) const {
    return ((first_draft > 0.0 ? first_draft : draft_step) + (drafts - 1) * draft_step) / drafts / plain_step();
  }
  bool operator==(const StageCosts& other) const;
};

// What a calibration measures.
struct Costs {
  StageCosts turns;                        // one stage after the other: on one machine, each with all threads
  std::optional<StageCosts> overlapped;    // side by side: each with its own threads. None: stages cannot overlap
  bool crowded = false;                    // measured while others had so much of the cores that fewer threads worked

  double plain() const { return turns.plain_step(); }
  bool operator==(const Costs& other) const {
    return turns == other.turns && overlapped == other.overlapped && crowded == other.crowded;
  }
};

// Throws std::invalid_argument for costs of the wrong shape (tables of less than kMaxRows rows, a link too few), negative
// ones, and more rows for less. In any unit.
void check(const StageCosts& costs);
// The same for what cannot have been measured, in seconds: steps and passes of 0, or anything absurdly small or great.
void check(const Costs& costs);

}  // namespace ppsd
