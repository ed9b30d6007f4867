#include "planner.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simulated.h"

namespace ppsd {
namespace {

using Mode = Prediction::Mode;

const double kFade = StopRule().discount;   // of what was observed, at each verdict and rescue

// Tokens of a round of `length` drafts.
double tokens_per_round(double acceptance, int length) {
  double tokens = 1.0, all = 1.0;
  for (int k = 0; k < length; ++k) tokens += all *= acceptance;
  return tokens;
}

// Drafts, then their verification: plain decoding, if there are none. threshold: of the survival stop rule.
Schedule in_turns(int drafts, double threshold) {
  Schedule schedule;
  schedule.stop_rule.kind = StopRule::Kind::kSurvival;
  schedule.stop_rule.threshold = threshold;
  schedule.first_chunk = schedule.max_chunk = schedule.lookahead = drafts;
  return schedule;
}

// What the row after n drafts, and those after it, add to a pass: of a group of rows that the kernels take together, each has
// its share.
double next_row(const StageCosts& costs, int drafts) {
  const double before = costs.pass(drafts + 1);
  double least = costs.pass(drafts + 2) - before;
  for (int more = 2; drafts + 1 + more <= kMaxRows; ++more)
    least = std::min(least, (costs.pass(drafts + 1 + more) - before) / more);
  return least;
}

// What a second row adds to a pass, where it adds the most: the other stages wait for that one anyway.
double dearest_row(const StageCosts& costs) {
  double dearest = 0.0;
  for (const PassCosts& stage : costs.verify) dearest = std::max(dearest, stage.seconds(2) - stage.seconds(1));
  return dearest;
}

}  // namespace

std::vector<Schedule> overlapped_schedules(bool ranks) {
  const auto overlapped = [](int first_chunk, int max_chunk) {
    Schedule schedule = in_turns(kMaxChunk, std::numeric_limits<double>::min());   // no chance is so small
    schedule.first_chunk = first_chunk;
    schedule.max_chunk = max_chunk;
    schedule.overlap = true;
    return schedule;
  };
  // `elastic`; over ranks also with other first chunks, and PPSD (ppsd_rt/pipeline/schedule.py).
  if (!ranks) return {overlapped(2, 8)};
  return {overlapped(0, 8), overlapped(0, 1), overlapped(1, 8), overlapped(2, 8), overlapped(4, 8)};
}

Planner::Planner(const Costs& costs, double prior, int lookup, bool siblings, bool recycle)
    : measured_costs_(costs),
      costs_(costs),
      lookup_(lookup),
      recycle_(recycle),
      siblings_(siblings),
      accepted_(kTuning.prior_weight * (std::isfinite(prior) ? std::clamp(prior, 0.01, 0.99) : 0.5)),
      rejected_(kTuning.prior_weight - accepted_),
      ranks_(costs.overlapped && !costs.overlapped->links.empty()),
      overlaps_(costs.overlapped ? overlapped_schedules(ranks_) : std::vector<Schedule>()) {
  overlapped_stay_ = kTuning.stay * (ranks_ ? costs.overlapped->stages() + 1 : 1);
  apart_ = ranks_ ? 1 : kTuning.stay;
  const double extra = costs.turns.round(1, 2) - costs.plain();
  first_probe_ = int(std::clamp(extra / costs.plain() / kTuning.probing, 4.0, 1000.0));
  probe_after_ = first_probe_;
  begin(StageCosts::kContext);
}

void Planner::begin(int context) {
  credit_ = std::clamp(credit_, kTuning.allowance * kTuning.allowed_ahead, kTuning.carried);
  tokens_ = 0;
  restarts_ = 1.0;
  move_to(context);
  decide();
}

void Planner::move_to(int context) {
  costs_.turns = measured_costs_.turns.after(context);
  if (!costs_.overlapped) return;
  size_t doubled = 0;
  while (context >= (2 * StageCosts::kContext << doubled)) ++doubled;
  if (doubled < simulated_.size() && doubled == doubled_) return;
  doubled_ = doubled;
  costs_.overlapped = measured_costs_.overlapped->after(StageCosts::kContext << doubled_);
  if (doubled_ >= simulated_.size()) simulated_.resize(doubled_ + 1, Simulated(overlaps_.size()));
}

// Tokens per second of an overlapped schedule at acceptance i / kGrid. One simulation takes a tenth of a plain step, so
// only those run that are asked for.
double Planner::simulated(int which, int i) const {
  double& speed = simulated_[doubled_][size_t(which)][size_t(i)];
  if (speed == 0.0) speed = simulate_overlap(overlaps_[size_t(which)], *costs_.overlapped, double(i) / kGrid);
  return speed;
}

// -- predictions -------------------------------------------------------------------------------------------------------

Prediction Planner::predict_plain() const { return {Mode::kPlain, 0, 1.0 / corrected(Mode::kPlain, costs_.plain())}; }

Prediction Planner::predict_turns(int length, double acceptance) const {
  const double seconds = costs_.turns.round(length, length + 1);
  return {Mode::kTurns, length, (tokens_per_round(acceptance, length) + rescued_) / corrected(Mode::kTurns, seconds)};
}

Prediction Planner::predict_overlap(int which, double acceptance) const {
  const double at = acceptance * kGrid;
  const int i = std::min(int(at), kGrid - 1);
  const double low = simulated(which, i), speed = low + (at - i) * (simulated(which, i + 1) - low);
  return {Mode::kOverlap, which, 1.0 / corrected(Mode::kOverlap, 1.0 / speed)};
}

Prediction Planner::predict_overlap(double acceptance) const {
  Prediction best{Mode::kOverlap, 0, 0.0};
  for (int which = 0; which < int(overlaps_.size()); ++which) {
    const Prediction other = predict_overlap(which, acceptance);
    if (other.tokens_per_second > best.tokens_per_second) best = other;
  }
  return best;
}

Prediction Planner::best_turns(double acceptance, int most) const {
  Prediction best = predict_turns(1, acceptance);
  for (int length = 2; length <= most; ++length) {
    const Prediction other = predict_turns(length, acceptance);
    if (other.tokens_per_second > best.tokens_per_second) best = other;
  }
  return best;
}

std::vector<Prediction> Planner::predictions() const {
  std::vector<Prediction> all{predict_plain()};
  for (int length = 1; length <= kMaxChunk; ++length) all.push_back(predict_turns(length, acceptance()));
  if (costs_.overlapped) all.push_back(predict_overlap(acceptance()));
  return all;
}

// -- learning ----------------------------------------------------------------------------------------------------------

const Schedule& Planner::after(const Round& round, double seconds, bool left_over) {
  if (left_over) learn_left_over(round);
  else learn(round, seconds);
  move_to(round.position + int(round.committed.size()));
  decide();
  return schedule_;
}

// -> is there a draft that was right?
bool Planner::learn_verdicts(const Round& round) {
  bool right = false;
  for (int i = 0; i < int(round.judged.size()); ++i) {
    if (round.judged[i].copied > 0) continue;
    right = right || i < round.accepted;
    ++verdicts_;
    accepted_ *= kFade;
    rejected_ *= kFade;
    (i < round.accepted ? accepted_ : rejected_) += 1.0;
  }
  return right;
}

// What it has brought is earned; of the decision that is in force it tells nothing.
void Planner::learn_left_over(const Round& round) {
  learn_verdicts(round);
  account(Mode::kOverlap, int(round.committed.size()), overlapped_seconds(round));
}

void Planner::learn(const Round& round, double seconds) {
  const bool right = learn_verdicts(round);
  if (probing_) {
    since_probe_ = 0;   // a draft that was right is worth another one soon
    if (right) probe_after_ = first_probe_;
    else if (mode_ != Mode::kPlain && probe_left_ == 1)
      probe_after_ = std::max(first_probe_, std::min(2 * probe_after_, kTuning.last_probe));
  }
  if (siblings_ && mode_ == Mode::kTurns && !probing_) rescued_ += (1.0 - kFade) * (double(round.rescued) - rescued_);
  const int drafts = mode_ == Mode::kTurns ? std::max(round.rows - 1 - round.copied - round.siblings, 0) : 0;
  double expected = costs_.turns.round(drafts, std::clamp(round.rows, 1, kMaxRows));
  if (mode_ == Mode::kOverlap) expected = overlapped_seconds(round);
  else restarts_ = 1.0;
  Measured& measured = measured_[int(mode_)];
  measured.rounds += 1;
  measured.tokens += int(round.committed.size());
  measured.seconds += seconds;
  measured.predicted_seconds += expected;
  correct(seconds / expected);
  account(mode_, int(round.committed.size()), expected);
}

// A round is no unit of time here: tokens follow each other at the pace of right drafts, and a pipeline that was emptied
// costs the same whatever comes then. So many seconds as make up the simulated speed.
double Planner::overlapped_seconds(const Round& round) {
  const double a = std::min(acceptance(), 0.9), tokens = double(round.committed.size());
  const double on = 1.0 / simulated(overlap_, kGrid);
  const double speed = predict_overlap(overlap_, a).tokens_per_second * corrected(Mode::kOverlap, 1.0);
  const double restart = std::max((1.0 / speed - on) / (1.0 - a), 1.0 / simulated(overlap_, 0) - on);
  const double seconds = tokens * on + restarts_ * restart;
  const int judged = int(round.judged.size());
  restarts_ = double(round.accepted < judged) + (1.0 - acceptance()) * std::max(tokens - judged, 0.0);
  return seconds;
}

void Planner::correct(double ratio) {
  // A round that was held up (the core lost to another process, a slow consumer) says little about the next one.
  const int mode = int(mode_);
  const double usual = pace_ * bias_[mode];
  ratio = std::clamp(ratio, 0.6 * usual, kTuning.held_up * usual);
  ++round_;
  const bool first = mode_ != last_mode_;
  if (first) pace_before_ = pace_, switched_ = round_;
  last_mode_ = mode_;
  // It finds in the caches what rounds of the other kind have left there.
  if (first && mode_ != Mode::kOverlap && probing_ && probe_left_ > 1) return;
  const bool stale = round_ - sampled_[mode] > kTuning.same_moment;
  recent_[mode] = stale ? ratio : recent_[mode] + kTuning.recent * (ratio - recent_[mode]);
  sampled_[mode] = round_;
  if (mode_ != Mode::kPlain && round_ - switched_ < kTuning.same_moment) {
    const double step = std::max(kTuning.bias_step, 1.0 / (kTuning.costs_weight + ++compared_[mode]));
    bias_[mode] += step * (std::clamp(recent_[mode] / pace_before_, 0.5, 2.0) - bias_[mode]);
  } else {
    pace_ = recent_[mode] / bias_[mode];
  }
}

// Rounds of plain decoding cost one step by definition, so that neither the machine's pace nor its noise counts.
void Planner::account(Mode mode, int tokens, double seconds) {
  const int ahead = std::clamp(kTuning.allowed_ahead - tokens_, 0, tokens);
  tokens_ += tokens;
  credit_ += tokens + kTuning.allowance * (tokens - ahead) - bias_[int(mode)] * seconds / costs_.plain();
}

// Have drafting rounds become dearer or cheaper since the last plain round? Only another one tells whether all have.
bool Planner::drifted() const {
  const double since = recent_[int(Mode::kTurns)] / bias_[int(Mode::kTurns)] / recent_[int(Mode::kPlain)];
  return std::max(since, 1.0 / since) > kTuning.drift;
}

// Can the account pay for a round of drafts that takes so long, and commits only what a plain one would?
bool Planner::pays(double seconds, double credit) const { return seconds / costs_.plain() - 1.0 <= credit; }

int Planner::affordable_drafts() const {
  if (measured_[int(Mode::kPlain)].rounds == 0) return 0;   // there is nothing yet to compare drafts with
  int drafts = 0;
  while (drafts < kMaxChunk) {
    // Siblings are no matter here: a draft has one where it is not sure, and after such a draft there is no other.
    if (!pays(bias_[int(Mode::kTurns)] * costs_.turns.round(drafts + 1, std::min(drafts + 2, kMaxRows)),
              drafts == 0 ? credit_ : kTuning.stake * credit_)) break;
    ++drafts;
  }
  return drafts;
}

// A round that brings nothing: the first rows, with a draft each, and a pass over all that it may take.
bool Planner::affordable_overlap(int which) const {
  if (measured_[int(Mode::kPlain)].rounds == 0) return false;
  if (!ranks_ && verdicts_ < kTuning.acquainted) return false;
  const StageCosts& c = *costs_.overlapped;
  const Schedule& s = overlaps_[size_t(which)];
  const double drafting = c.draft_interference * (s.first_chunk + 1) * c.draft_step;
  const int rows = std::min((siblings_ ? 2 : 1) * s.max_chunk + 1, kMaxRows);
  return pays(bias_[int(Mode::kOverlap)] * (drafting + c.verify_interference * c.pass(rows)), credit_);
}

// Of about as fast ones the first: rows that wait may leave together, and a first wrong draft costs little.
Prediction Planner::best_overlap(double acceptance) const {
  Prediction best{Mode::kOverlap, 0, 0.0};
  for (int which = 0; which < int(overlaps_.size()); ++which) {
    if (!affordable_overlap(which)) continue;
    const Prediction other = predict_overlap(which, acceptance);
    if (other.tokens_per_second > kTuning.worth_switching * best.tokens_per_second) best = other;
  }
  return best;
}

int Planner::affordable_copies() const {
  int copies = 0;
  while (copies < kMaxChunk && pays(costs_.turns.round(0, copies + 2), kTuning.stake * credit_)) ++copies;
  return copies;
}

// -- deciding ----------------------------------------------------------------------------------------------------------

void Planner::decide() {
  const double a = acceptance();
  const int most = affordable_drafts();
  const Prediction plain = predict_plain(), turns = best_turns(a, most);
  Prediction best = most > 0 && turns.tokens_per_second > plain.tokens_per_second ? turns : plain;
  const bool overlapping = mode_ == Mode::kOverlap;
  const Prediction overlap = best_overlap(a);
  const double bar = !overlapping ? kTuning.worth_switching : ranks_ ? 1.0 : 1.0 / kTuning.worth_switching;
  if (overlap.tokens_per_second == 0.0) {
    // It has cost more than it may.
  } else if (overlapping && rounds_in_mode_ >= overlapped_stay_) {
    // Only beside other rounds it shows what overlapping is worth: costs side by side may come from another moment.
    overlapped_stay_ *= 3;
    if (ranks_) best = plain;
  } else if (rounds_in_mode_ < apart_ && round_ > 0) {
    if (overlapping) best = overlap;
  } else if ((ranks_ && verdicts_ < kTuning.acquainted) || overlap.tokens_per_second > bar * best.tokens_per_second) {
    best = overlap;
  }
  rounds_in_mode_ = (best.mode == Mode::kOverlap) == overlapping ? rounds_in_mode_ + 1 : 0;

  const int wait = best.mode != Mode::kPlain ? (drifted() ? kTuning.same_moment : kTuning.plain_probe)
                   : verdicts_ < kTuning.acquainted ? 0 : probe_after_;
  const bool may = best.mode != Mode::kOverlap && most > 0;
  if (probing_ && probe_left_ > 1 && may && best.mode == beside_) {
    --probe_left_;
  } else {
    probing_ = since_probe_++ >= wait && may;
    probe_left_ = verdicts_ < kTuning.acquainted ? 1 : kTuning.probe_rounds;
  }
  beside_ = best.mode;
  if (probing_ && best.mode == Mode::kTurns && drifted()) compared_[int(Mode::kTurns)] = 0;   // what was compared is past
  if (probing_) best = best.mode == Mode::kPlain ? predict_turns(1, a) : plain;
  // Drafting goes on while the chance that all drafts so far and the next one are right is worth what the next one
  // costs at the speed that is expected: the marginal rule of renewal rewards.
  const StageCosts& c = costs_.turns;
  const auto row = [&c](int rows) { return (c.pass(rows) - c.pass(1)) / (rows - 1); };
  const double more = c.draft_step + row(std::min(best.length + 2, kMaxRows));   // about where it will end
  const auto worth = [&](double seconds) {
    return std::clamp(corrected(best.mode, seconds) * best.tokens_per_second, 0.02, 0.98);
  };
  mode_ = best.mode;
  if (mode_ == Mode::kOverlap) {
    overlap_ = best.length;
    schedule_ = overlaps_[size_t(overlap_)];
  } else {
    const int drafts = mode_ == Mode::kPlain ? 0 : probing_ ? 1 : most;
    schedule_ = in_turns(drafts, worth(more / std::max(a, 0.05)));
  }
  if (siblings_ && !probing_ && mode_ == Mode::kTurns) schedule_.siblings = worth(row(std::min(best.length + 2, kMaxRows)));
  if (siblings_ && mode_ == Mode::kOverlap) schedule_.siblings = worth(dearest_row(*costs_.overlapped));
  if ((lookup_ > 0 || recycle_) && !probing_) {
    const int copies = mode_ == Mode::kPlain ? affordable_copies() : kMaxChunk;
    if (copies > 0) schedule_.lookup = lookup_, schedule_.recycle = recycle_;
    StopRule& rule = schedule_.stop_rule;
    rule.copy_threshold = worth(kTuning.copies * row(kMaxRows / 2));
    if (mode_ != Mode::kOverlap)
      for (int drafts = 0; drafts < kMaxChunk; ++drafts) {
        const double next = next_row(c, drafts);
        rule.thresholds.push_back(worth((c.draft_step + next) / std::max(a, 0.05)));
        rule.copy_thresholds.push_back(worth(kTuning.copies * next));
      }
    if (mode_ == Mode::kPlain) schedule_.max_chunk = copies;   // copies are its only drafts
  }
}

}  // namespace ppsd
