#include "planner.h"

#include <algorithm>
#include <cmath>

namespace ppsd {
namespace {

using Mode = Prediction::Mode;

constexpr double kPriorWeight = 6.0;    // verdicts that the prior counts as
constexpr double kMemory = 0.98;        // what a verdict counts after the next one: some fifty are remembered
constexpr double kSmoothing = 0.05;     // share of a new round in the corrections
constexpr int kGrid = 20;               // acceptances that overlapped schedules are simulated at, from 0 to 1
constexpr int kFirstProbe = 8, kLastProbe = 64;   // plain rounds before a probe: doubled by every one that fails
constexpr double kWorthSwitching = 1.03;          // gain that makes up for a change of carriers
constexpr int kStay = 32;                         // rounds between two of them

// Tokens of a round of `length` drafts.
double tokens_per_round(double acceptance, int length) {
  double tokens = 1.0, all = 1.0;
  for (int k = 0; k < length; ++k) tokens += all *= acceptance;
  return tokens;
}

}  // namespace

Schedule schedule_of(Mode mode, int length, double threshold) {
  Schedule schedule;
  schedule.stop_rule.kind = StopRule::Kind::kSurvival;
  schedule.stop_rule.threshold = threshold;
  if (mode == Mode::kTurns) schedule.first_chunk = schedule.max_chunk = schedule.lookahead = length;
  if (mode == Mode::kOverlap) {   // `elastic` of schedule.py
    schedule.first_chunk = 2;
    schedule.max_chunk = 8;
    schedule.lookahead = kMaxChunk;
    schedule.overlap = true;
    schedule.stop_rule.threshold = 0.0;
  }
  return schedule;
}

Planner::Planner(const Costs& costs, double prior, const Simulate& simulate)
    : costs_(costs), prior_(std::clamp(prior, 0.01, 0.99)), probe_after_(kFirstProbe) {
  if (costs.can_overlap)
    for (int i = 0; i <= kGrid; ++i)
      overlap_.push_back(simulate(schedule_of(Mode::kOverlap, 0, 0.0), costs, double(i) / kGrid));
  decide();
}

double Planner::acceptance() const {
  return (kPriorWeight * prior_ + accepted_) / (kPriorWeight + accepted_ + rejected_);
}

// -- predictions -------------------------------------------------------------------------------------------------------

Prediction Planner::predict_plain() const { return {Mode::kPlain, 0, 1.0 / corrected(Mode::kPlain, costs_.plain())}; }

Prediction Planner::predict_turns(int length, double acceptance) const {
  const Costs::Stages& c = costs_.turns;
  const double seconds = length * c.draft_step + c.row_step + c.verify[length + 1];
  return {Mode::kTurns, length, tokens_per_round(acceptance, length) / corrected(Mode::kTurns, seconds)};
}

Prediction Planner::predict_overlap(double acceptance) const {
  if (overlap_.empty()) return {Mode::kOverlap, 0, 0.0};
  const double at = acceptance * kGrid;
  const int i = std::min(int(at), kGrid - 1);
  const double speed = overlap_[i] + (at - i) * (overlap_[i + 1] - overlap_[i]);
  return {Mode::kOverlap, 0, 1.0 / corrected(Mode::kOverlap, 1.0 / speed)};
}

Prediction Planner::best_turns(double acceptance) const {
  Prediction best = predict_turns(1, acceptance);
  for (int length = 2; length <= kMaxChunk; ++length) {
    const Prediction other = predict_turns(length, acceptance);
    if (other.tokens_per_second > best.tokens_per_second) best = other;
  }
  return best;
}

std::vector<Prediction> Planner::predictions() const {
  std::vector<Prediction> all{predict_plain()};
  for (int length = 1; length <= kMaxChunk; ++length) all.push_back(predict_turns(length, acceptance()));
  if (!overlap_.empty()) all.push_back(predict_overlap(acceptance()));
  return all;
}

// -- learning ----------------------------------------------------------------------------------------------------------

const Schedule& Planner::after(const Round& round, double seconds) {
  learn(round, seconds);
  decide();
  return schedule_;
}

void Planner::learn(const Round& round, double seconds) {
  for (int i = 0; i < int(round.judged.size()); ++i) {
    accepted_ *= kMemory;
    rejected_ *= kMemory;
    (i < round.accepted ? accepted_ : rejected_) += 1.0;
  }
  if (probing_) {   // a probe that was right is worth another one soon
    probe_after_ = round.accepted > 0 ? kFirstProbe / 2 : std::min(2 * probe_after_, kLastProbe);
    plain_rounds_ = 0;
  }
  const Costs::Stages& c = costs_.turns;
  double expected = costs_.plain();
  if (mode_ == Mode::kTurns) {
    const int drafts = round.rows - 1;
    expected = drafts * c.draft_step + c.row_step + c.verify[std::clamp(round.rows, 1, kMaxRows)];
  } else if (mode_ == Mode::kOverlap) {   // a round is no unit of time here: what its tokens should have taken
    expected = double(round.committed.size()) / predict_overlap(acceptance()).tokens_per_second /
               correction_[int(Mode::kOverlap)];
  }
  Measured& measured = measured_[int(mode_)];
  measured.rounds += 1;
  measured.tokens += int(round.committed.size());
  measured.seconds += seconds;
  measured.predicted_seconds += expected;
  // A round that was held up (the core lost to another process, a slow consumer) says little about the next one.
  const double ratio = std::clamp(seconds / expected, 0.5, 2.0);
  double& correction = correction_[int(mode_)];
  correction += kSmoothing * (ratio - correction);
}

// -- deciding ----------------------------------------------------------------------------------------------------------

void Planner::decide() {
  const double a = acceptance();
  const Prediction plain = predict_plain(), turns = best_turns(a), overlap = predict_overlap(a);
  Prediction best = turns.tokens_per_second > plain.tokens_per_second ? turns : plain;
  const bool overlapping = mode_ == Mode::kOverlap;
  const double bar = overlapping ? 1.0 / kWorthSwitching : kWorthSwitching;
  if (rounds_in_mode_ < kStay && measured_[0].rounds + measured_[1].rounds + measured_[2].rounds > 0) {
    if (overlapping) best = overlap;
  } else if (overlap.tokens_per_second > bar * best.tokens_per_second) {
    best = overlap;
  }
  rounds_in_mode_ = (best.mode == Mode::kOverlap) == overlapping ? rounds_in_mode_ + 1 : 0;

  probing_ = false;
  if (best.mode == Mode::kPlain && plain_rounds_++ >= probe_after_) {
    probing_ = true;
    best = predict_turns(1, a);
  }
  // Drafting goes on while the chance that all drafts so far and the next one are right is worth what the next one
  // costs at the speed that is expected: the marginal rule of renewal rewards.
  const Costs::Stages& c = costs_.turns;
  const double more = c.draft_step + (c.verify[kMaxRows] - c.verify[1]) / (kMaxRows - 1);
  const double threshold = std::clamp(more * best.tokens_per_second / std::max(a, 0.05), 0.02, 0.98);
  mode_ = best.mode;
  schedule_ = schedule_of(best.mode, probing_ ? 1 : kMaxChunk, threshold);
}

}  // namespace ppsd
