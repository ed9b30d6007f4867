#include "planner.h"

#include <algorithm>
#include <cmath>

namespace ppsd {
namespace {

using Mode = Prediction::Mode;

constexpr double kPriorWeight = 2.0;    // verdicts that the prior counts as; it fades as they do
constexpr double kMemory = 0.98;        // what a verdict counts after the next one: some fifty are remembered
constexpr double kPromises = 6.0;       // copies that are taken to have kept what they promised, to begin with
constexpr double kRecent = 0.2;         // share of a new round in what is recent
constexpr double kBiasStep = 0.04;      // share of a new comparison in a bias
constexpr int kSameMoment = 12;         // rounds after a change of mode in which the pace is still the one before it
constexpr double kProbing = 0.015;                // share of the time that drafts may cost that are only tried
constexpr int kLastProbe = 64;                    // plain rounds before a draft is tried, at most if that is cheap
constexpr int kPlainProbe = 48;                   // other rounds before a plain one
constexpr double kAllowance = 0.02;               // share of an answer's plain steps that its drafts may lose
constexpr int kAllowedAhead = 16;                 // tokens whose share may be spent before they are decoded
constexpr double kCarried = 1.0;                  // plain steps at most that an answer inherits from those before it
constexpr double kStake = 0.5;                    // share of what is left that a round may risk
constexpr int kFirstRounds = 1;                   // plain ones, at the beginning: what drafts are compared with
constexpr int kAcquainted = 8;                    // verdicts; until then a head is tried whenever that can be paid
constexpr double kWorthSwitching = 1.03;          // gain that makes up for a change of carriers
constexpr int kStay = 32;                         // rounds between two of them
constexpr int kLongestStay = 512;                 // overlapping rounds behind each other, in the end

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

Costs::Stages Costs::Stages::behind(int context) const {
  const double more = context - kContext;
  // (A shorter text saves at most half of anything: slopes are measured, and may be somewhat wrong.)
  const auto deeper = [more](double seconds, double slope) { return std::max(seconds + more * slope, 0.5 * seconds); };
  Stages out = *this;
  out.row_step = deeper(row_step, step_deeper);
  out.draft_step = deeper(draft_step, step_deeper);
  if (first_draft > 0.0) out.first_draft = deeper(first_draft, step_deeper);
  if (plain > 0.0) out.plain = deeper(plain, step_deeper + verify_deeper[1]);
  for (int rows = 1; rows <= kMaxRows; ++rows) out.verify[rows] = deeper(verify[rows], verify_deeper[rows]);
  return out;
}

Planner::Planner(const Costs& costs, double prior, const Simulate& simulate, int lookup, bool siblings)
    : measured_costs_(costs),
      simulate_(simulate),
      costs_(costs),
      lookup_(lookup),
      siblings_(siblings),
      accepted_(kPriorWeight * (std::isfinite(prior) ? std::clamp(prior, 0.01, 0.99) : 0.4)),
      rejected_(kPriorWeight - accepted_),
      promised_(kPromises),
      kept_(kPromises) {
  overlapped_stay_ = kStay;
  const double extra = costs.turns.round(1, 2) - costs.plain();
  first_probe_ = int(std::clamp(extra / costs.plain() / kProbing, 4.0, 1000.0));
  probe_after_ = first_probe_;
  begin(Costs::kContext);
}

void Planner::begin(int context) {
  credit_ = std::clamp(credit_, kAllowance * kAllowedAhead, kCarried);
  tokens_ = 0;
  move_to(context);
  decide();
}

void Planner::move_to(int context) {
  costs_.turns = measured_costs_.turns.behind(context);
  if (!costs_.can_overlap) return;
  doubled_ = 0;
  while (context >= (2 * Costs::kContext << doubled_)) ++doubled_;
  costs_.overlapped = measured_costs_.overlapped.behind(Costs::kContext << doubled_);
  if (doubled_ >= simulated_.size()) simulated_.resize(doubled_ + 1);
}

// Tokens per second of overlapping at acceptance i / kGrid. One simulation takes a tenth of a plain step, so only those
// run that are asked for.
double Planner::simulated(int i) const {
  double& speed = simulated_[doubled_][i];
  if (speed == 0.0) speed = simulate_(schedule_of(Mode::kOverlap, 0, 0.0), costs_, double(i) / kGrid);
  return speed;
}

// -- predictions -------------------------------------------------------------------------------------------------------

Prediction Planner::predict_plain() const { return {Mode::kPlain, 0, 1.0 / corrected(Mode::kPlain, costs_.plain())}; }

Prediction Planner::predict_turns(int length, double acceptance) const {
  const double seconds = costs_.turns.round(length, length + 1);
  return {Mode::kTurns, length, (tokens_per_round(acceptance, length) + rescued_) / corrected(Mode::kTurns, seconds)};
}

Prediction Planner::predict_overlap(double acceptance) const {
  if (!costs_.can_overlap) return {Mode::kOverlap, 0, 0.0};
  const double at = acceptance * kGrid;
  const int i = std::min(int(at), kGrid - 1);
  const double speed = simulated(i) + (at - i) * (simulated(i + 1) - simulated(i));
  return {Mode::kOverlap, 0, 1.0 / corrected(Mode::kOverlap, 1.0 / speed)};
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
  if (costs_.can_overlap) all.push_back(predict_overlap(acceptance()));
  return all;
}

// -- learning ----------------------------------------------------------------------------------------------------------

const Schedule& Planner::after(const Round& round, double seconds) {
  learn(round, seconds);
  move_to(round.position + int(round.committed.size()));
  decide();
  return schedule_;
}

void Planner::learn(const Round& round, double seconds) {
  bool right = false;
  for (int i = 0; i < int(round.judged.size()); ++i) {
    if (round.judged[i].copied > 0) {
      promised_ = kMemory * promised_ + round.judged[i].confidence;
      kept_ = kMemory * kept_ + (i < round.accepted);
      continue;
    }
    right = right || i < round.accepted;
    ++verdicts_;
    accepted_ *= kMemory;
    rejected_ *= kMemory;
    (i < round.accepted ? accepted_ : rejected_) += 1.0;
  }
  if (probing_) {
    since_probe_ = 0;   // a draft that was right is worth another one soon
    if (mode_ != Mode::kPlain)
      probe_after_ = right ? first_probe_ : std::max(first_probe_, std::min(2 * probe_after_, kLastProbe));
  }
  if (siblings_ && mode_ == Mode::kTurns && !probing_) rescued_ += (1.0 - kMemory) * (double(round.rescued) - rescued_);
  const int drafts = mode_ == Mode::kTurns ? std::max(round.rows - 1 - round.copied - round.siblings, 0) : 0;
  double expected = costs_.turns.round(drafts, std::clamp(round.rows, 1, kMaxRows));
  if (mode_ == Mode::kOverlap) {   // a round is no unit of time here: what its tokens should have taken
    expected = double(round.committed.size()) / predict_overlap(acceptance()).tokens_per_second /
               corrected(Mode::kOverlap, 1.0);
  }
  Measured& measured = measured_[int(mode_)];
  measured.rounds += 1;
  measured.tokens += int(round.committed.size());
  measured.seconds += seconds;
  measured.predicted_seconds += expected;
  correct(seconds / expected);
  account(int(round.committed.size()), expected);
}

void Planner::correct(double ratio) {
  // A round that was held up (the core lost to another process, a slow consumer) says little about the next one.
  const int mode = int(mode_);
  const double usual = pace_ * bias_[mode];
  ratio = std::clamp(ratio, 0.6 * usual, 1.6 * usual);
  ++round_;
  if (mode_ != last_mode_) pace_before_ = pace_, switched_ = round_;
  last_mode_ = mode_;
  const bool stale = round_ - sampled_[mode] > kSameMoment;
  recent_[mode] = stale ? ratio : recent_[mode] + kRecent * (ratio - recent_[mode]);
  sampled_[mode] = round_;
  if (mode_ != Mode::kPlain && round_ - switched_ < kSameMoment)
    bias_[mode] += kBiasStep * (std::clamp(recent_[mode] / pace_before_, 0.5, 2.0) - bias_[mode]);
  else
    pace_ = recent_[mode] / bias_[mode];
}

// Rounds of plain decoding cost one step by definition, so that neither the machine's pace nor its noise counts.
void Planner::account(int tokens, double seconds) {
  const int ahead = std::clamp(kAllowedAhead - tokens_, 0, tokens);
  tokens_ += tokens;
  credit_ += tokens + kAllowance * (tokens - ahead) - bias_[int(mode_)] * seconds / costs_.plain();
}

// Can the account pay for a round of drafts that takes so long, and commits only what a plain one would?
bool Planner::pays(double seconds, double credit) const { return seconds / costs_.plain() - 1.0 <= credit; }

int Planner::affordable_drafts() const {
  if (measured_[int(Mode::kPlain)].rounds < kFirstRounds) return 0;
  int drafts = 0;
  while (drafts < kMaxChunk) {
    const int rows = std::min((siblings_ ? 2 : 1) * (drafts + 1) + 1, kMaxRows);
    if (!pays(bias_[int(Mode::kTurns)] * costs_.turns.round(drafts + 1, rows), drafts == 0 ? credit_ : kStake * credit_)) break;
    ++drafts;
  }
  return drafts;
}

// A pass over all rows that brings nothing, drafting beside it.
bool Planner::may_overlap() const {
  const Costs::Stages& c = costs_.overlapped;
  return costs_.can_overlap && verdicts_ >= kAcquainted &&
         pays(bias_[int(Mode::kOverlap)] * (c.draft_step + c.row_step + c.verify[kMaxRows]), credit_);
}

int Planner::affordable_copies() const {
  int copies = 0;
  while (copies < kMaxChunk && pays(costs_.turns.round(0, copies + 2), kStake * credit_)) ++copies;
  return copies;
}

// -- deciding ----------------------------------------------------------------------------------------------------------

void Planner::decide() {
  const double a = acceptance();
  const int most = affordable_drafts();
  const Prediction plain = predict_plain(), turns = best_turns(a, most);
  Prediction best = most > 0 && turns.tokens_per_second > plain.tokens_per_second ? turns : plain;
  const bool overlapping = mode_ == Mode::kOverlap;
  const Prediction overlap = overlapping || may_overlap() ? predict_overlap(a) : Prediction{};
  const double bar = overlapping ? 1.0 / kWorthSwitching : kWorthSwitching;
  if (overlapping && credit_ < 0.0) {
    // It has cost more than it may.
  } else if (overlapping && rounds_in_mode_ >= overlapped_stay_) {
    // Only beside other rounds it shows what overlapping is worth: costs side by side may come from another moment.
    overlapped_stay_ = std::min(3 * overlapped_stay_, kLongestStay);
  } else if (rounds_in_mode_ < kStay && measured_[0].rounds + measured_[1].rounds + measured_[2].rounds > 0) {
    if (overlapping) best = overlap;
  } else if (overlap.tokens_per_second > bar * best.tokens_per_second) {
    best = overlap;
  }
  rounds_in_mode_ = (best.mode == Mode::kOverlap) == overlapping ? rounds_in_mode_ + 1 : 0;

  const int wait = best.mode != Mode::kPlain ? kPlainProbe : verdicts_ < kAcquainted ? 0 : probe_after_;
  probing_ = since_probe_++ >= wait && best.mode != Mode::kOverlap && most > 0;
  if (probing_) best = best.mode == Mode::kPlain ? predict_turns(1, a) : plain;
  // Drafting goes on while the chance that all drafts so far and the next one are right is worth what the next one
  // costs at the speed that is expected: the marginal rule of renewal rewards.
  const Costs::Stages& c = costs_.turns;
  const auto row = [&c](int rows) { return (c.verify[rows] - c.verify[1]) / (rows - 1); };
  const double more = c.draft_step + row(std::min(best.length + 2, kMaxRows));   // about where it will end
  const auto worth = [&](double seconds) {
    return std::clamp(corrected(best.mode, seconds) * best.tokens_per_second, 0.02, 0.98);
  };
  mode_ = best.mode;
  schedule_ = schedule_of(best.mode, probing_ ? 1 : most, worth(more / std::max(a, 0.05)));
  if (siblings_ && !probing_ && mode_ == Mode::kTurns) schedule_.siblings = worth(row(std::min(best.length + 2, kMaxRows)));
  if (lookup_ > 0 && !probing_) {
    const int copies = mode_ == Mode::kPlain ? affordable_copies() : kMaxChunk;
    if (copies > 0) schedule_.lookup = lookup_;
    // Matches say less of a sampled text than of a greedy one: a chance is worth what copies have kept of theirs.
    const double kept = std::clamp(kept_ / std::max(promised_, 1e-3), 0.2, 1.5);
    schedule_.stop_rule.copy_threshold = std::min(worth(row(kMaxRows / 2)) / kept, 0.98);
    if (mode_ == Mode::kPlain) schedule_.max_chunk = copies;   // copies are its only drafts
  }
}

}  // namespace ppsd
