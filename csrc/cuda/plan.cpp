#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ppsd::cuda {

Plan::Plan(const Schedule& schedule, const Limits& limits, uint64_t seed, int stages, uint32_t whole,
           OwnedNgrams ngrams)
    : schedule_(schedule),
      stages_(stages),
      whole_(whole),
      text_(schedule.stop_rule, limits, seed),
      phase_(schedule.overlap ? Phase::kFresh : Phase::kIdle) {
  text_.remember(std::move(ngrams));
}

Round Plan::begin(const std::vector<int>& prompt, int keep, int first) {
  Round round = text_.begin(prompt, keep, first, schedule_);
  finished_ = text_.ended();
  look();
  return round;
}

Step Plan::next(int64_t drafts_done) {
  if (finished_) return {};
  if (pending_ && !open() && flights_.empty()) adopt_pending();
  if (pending_ && !open()) return {};
  return schedule_.overlap ? next_overlapped(drafts_done) : next_in_turns();
}

Step Plan::draft(Step::Kind kind) {
  return {kind, launched_++ - 1, schedule_.overlap ? -1 : passes_ - 1, 0, 0, 0};
}

Step Plan::pass(int64_t after_draft, int rows) {
  flights_.push_back(rows);
  // It begins after what the passes in flight will have committed, of which each takes up to kMaxRows rows.
  // With overlap it begins after the others' first stages (their stream sees to it), not after their verdicts.
  const int first = text_.size() - 1;
  const int64_t before = passes_++ - 1;
  return {Step::Kind::kVerify, after_draft, schedule_.overlap ? -1 : before, first, kMaxRows * passes_in_flight(), 0};
}

// -- without overlap ---------------------------------------------------------------------------------------------------

Step Plan::next_in_turns() {
  // Every pass in flight commits a token at least.
  const int in_flight = passes_in_flight();
  const int left = text_.end() - text_.size() - in_flight;
  if (left <= 0) return {};
  const bool by_confidence = needs_confidence() && schedule_.lookahead > 0;
  const bool changes = needs_confidence() || schedule_.copies();
  const int ahead = by_confidence || repeats_ ? 1 : changes ? kPlannedAhead : kRoundsAhead;
  // The last position before the end needs no draft; a schedule that waits for none still drafts one.
  const int wanted = std::min({std::max(schedule_.first_chunk, int(schedule_.lookahead > 0)), schedule_.lookahead, left - 1});
  if (phase_ == Phase::kIdle) {
    // A rule that asks for confidences cannot tell the next round's length before this one's verdict; its first draft can run.
    const bool early = by_confidence && !repeats_ && in_flight == ahead && wanted > 1 && !pending_;
    if (in_flight >= ahead && !early) return {};
    stopped_ = false, drafts_ = 0;
    standing_.clear();
    if (in_flight == 0) copy();
    const int drawn = stopped_ ? 0 : std::max(0, wanted - int(standing_.size()));
    const bool never_stops = drawn == 0 || schedule_.stop_rule.kind == StopRule::Kind::kFixed;
    const bool with_row = schedule_.first_chunk > 0 || drawn == 0;
    if (!early && never_stops && with_row && (whole_ >> drawn & 1) != 0) {
      Step step = pass(launched_++ - 1, kMaxRows);
      asked_ = launched_;
      step.kind = Step::Kind::kRound, step.drafts = drawn;
      return step;
    }
    phase_ = Phase::kDrafting;
  }
  const int copied = int(std::count_if(standing_.begin(), standing_.end(), [](const Draft& draft) { return draft.copied > 0; }));
  if (phase_ == Phase::kDrafting && !stopped_ && drafts_ + copied < wanted) {
    // One draft is queued beyond the one that the rule is asked about: it runs while the answer travels.
    const bool told = !by_confidence || (in_flight < ahead ? launched_ - asked_ < 2 : drafts_ == 0);
    if (!told) return {};
    ++drafts_;
    const Step step = draft(Step::Kind::kDraft);
    if (!by_confidence) asked_ = launched_, stopped_ = text_.controller().stop(0.0);
    return step;
  }
  if (by_confidence && in_flight >= ahead) return {};
  if (phase_ == Phase::kDrafting && (schedule_.first_chunk > 0 || drafts_ == 0)) {
    phase_ = Phase::kRowQueued;
    const Step step = draft(Step::Kind::kRow);
    asked_ = launched_;
    return step;
  }
  phase_ = Phase::kIdle;
  asked_ = launched_;
  return pass(launched_ - 1, kMaxRows);
}

// -- with overlap ------------------------------------------------------------------------------------------------------

Step Plan::next_overlapped(int64_t drafts_done) {
  if (std::exchange(look_again_, false)) standing_.clear(), copy();
  const int64_t standing = launched_ - judged_;   // draft tokens beyond the committed text, once all have run
  const int most = std::max(1, std::min(schedule_.lookahead, text_.end() - 1 - text_.size()));
  int64_t held = 0;   // rows that passes in flight may hold; they hold one at least, or are void
  for (int rows : flights_) held += rows;
  if (passes_in_flight() < stages_) {
    const int rows = std::min(schedule_.max_chunk + int(held == 0), kMaxRows);
    const int64_t need = phase_ == Phase::kFresh ? std::min(schedule_.first_chunk + 1, most) : 1;
    const int64_t enough = judged_ + held + need;
    if (launched_ >= enough || (stopped_ && standing > held)) {
      phase_ = Phase::kFlowing;
      return pass(std::min(enough, launched_) - 1, rows);
    }
  }
  const bool needed = flights_.empty() && standing <= 0;
  if ((needed || (!stopped_ && standing < most)) && launched_ - drafts_done < kDraftsAhead) {
    const Step step = draft(Step::Kind::kDraft);
    if (!needs_confidence()) asked_ = launched_, stopped_ = text_.controller().stop(0.0);
    return step;
  }
  return {};
}

// -- verdicts ----------------------------------------------------------------------------------------------------------

std::optional<Round> Plan::land(const Record& record, int64_t drafts_done) {
  if (flights_.empty()) throw std::runtime_error("the GPU has sent a verdict that no pass was launched for");
  const bool void_already = flights_.front() == 0;
  flights_.pop_front();
  if (finished_) return std::nullopt;
  if (record.committed.empty()) {
    // Not by a rejection, but for want of rows: one more draft step before the next try.
    if (schedule_.overlap && !void_already) begin_again(drafts_done);
    return std::nullopt;
  }
  if (record.position != text_.size())
    throw std::runtime_error("the GPU's verdict is for position " + std::to_string(record.position) + ", but the text has " +
                             std::to_string(text_.size()) + " tokens");
  Round round;
  round.epoch = uint64_t(record.epoch);
  round.position = record.position;
  round.rows = record.rows;
  for (int token : record.committed) {
    if (token < 0) throw std::runtime_error(kNoNumber);
    round.committed.push_back(token);
    finished_ = text_.append(token);
    if (finished_) break;
  }
  const int count = int(round.committed.size());
  round.judged.assign(record.judged.begin(), record.judged.begin() + std::min(count, int(record.judged.size())));
  round.accepted = std::min(record.accepted, int(round.judged.size()));
  round.copied = record.copied;
  text_.observe(round, schedule_);
  text_.learn(schedule_);
  look();
  const bool rejected = record.accepted < int(record.judged.size());
  if (schedule_.overlap) {
    stopped_ = false;
    if (rejected) {
      const int64_t run = std::min(drafts_done, launched_) - judged_;
      round.dropped = int(std::max<int64_t>(0, run - int(round.judged.size())));
      begin_again(drafts_done);
      std::fill(flights_.begin(), flights_.end(), 0);   // void
      phase_ = Phase::kFresh;
    } else if (record.copied > 0) {   // rows without a launch of their own: what stands now is known after the next one
      begin_again(drafts_done);
    } else {
      judged_ += record.rows;
    }
  } else {
    round.dropped = std::max(0, record.rows - 1 - int(round.judged.size()));
  }
  return round;
}

// The draft step that may be running began before the verdict was known; the one after it will not.
void Plan::begin_again(int64_t drafts_done) {
  judged_ = std::min(drafts_done + 1, launched_);
  asked_ = std::max(asked_, judged_);
}

// -- copies ------------------------------------------------------------------------------------------------------------

// After what stands; the device is told of all of it, or that there is nothing any more.
void Plan::copy() {
  bool any = false;
  for (; const auto draft = to_copy(); any = true) {
    standing_.push_back(*draft);
    const bool stops = text_.controller().stop_copying(draft->confidence);
    if (!schedule_.overlap) stopped_ = stopped_ || stops;
  }
  if (any) offer_ = Offer{text_.size(), standing_, most_standing()};
  else if (offering_) offer_ = Offer{};
  offering_ = any;
}

// The text or the schedule has changed.
void Plan::look() {
  standing_.clear();
  repeats_ = !schedule_.overlap && to_copy().has_value();
  look_again_ = true;
}

// -- stop rules --------------------------------------------------------------------------------------------------------

bool Plan::needs_confidence() const {
  const StopRule::Kind kind = schedule_.stop_rule.kind;
  return kind != StopRule::Kind::kFixed && kind != StopRule::Kind::kBeta &&
         !(kind == StopRule::Kind::kSurvival && schedule_.stop_rule.threshold <= 0.0);   // which never stops
}

int64_t Plan::wants_confidence() const {
  if (finished_ || !needs_confidence() || stopped_) return -1;
  const bool mine = schedule_.overlap || (open() && flights_.empty());   // a chunk is judged before the next is asked about
  return mine && asked_ < launched_ ? asked_ : -1;
}

void Plan::drafted(const std::optional<Draft>& draft, int position) {
  asked_ = wants_confidence() + 1;
  if (!draft) return;
  stopped_ = text_.controller().stop(draft->confidence);
  if (schedule_.overlap || !schedule_.copies()) return;
  // A draft that agrees with a copy which stands there is as good as that; else nothing is known of what comes after it.
  const int place = position - text_.size();
  if (place < 0 || place > int(standing_.size())) return;
  if (place < int(standing_.size()) && standing_[size_t(place)].token == draft->token) return;
  standing_.resize(size_t(place));
  standing_.push_back(*draft);
  copy();
}

void Plan::set_schedule(const Schedule& schedule) {
  pending_.reset();
  if (schedule.overlap != schedule_.overlap) pending_ = schedule;
  else adopt(schedule);
}

void Plan::adopt(const Schedule& schedule) {
  text_.change_rule(schedule_.stop_rule, schedule.stop_rule);
  schedule_ = schedule;
  text_.learn(schedule_);
  look();
}

void Plan::adopt_pending() {
  adopt(*std::exchange(pending_, std::nullopt));
  judged_ = asked_ = launched_, stopped_ = false;
  phase_ = schedule_.overlap ? Phase::kFresh : Phase::kIdle;
}

}  // namespace ppsd::cuda
