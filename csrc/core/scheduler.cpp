#include "scheduler.h"

#include <algorithm>
#include <utility>

namespace ppsd {
namespace {

// Of rows whose first one turned out to be wrong: what its sibling's row gave, as a verdict on that row alone.
Verdict of_the_sibling(const Verdict& verdict) {
  const size_t row = size_t(verdict.rows()), width = verdict.hidden.size() / verdict.true_ids.size();
  const auto hidden = verdict.hidden.begin() + ptrdiff_t(row * width);
  Verdict only;
  only.start = verdict.start;
  only.true_ids = {verdict.true_ids[row]};
  only.hidden.assign(hidden, hidden + ptrdiff_t(width));
  if (!verdict.logprobs.empty()) only.logprobs = {verdict.logprobs[row]};
  return only;
}

}  // namespace

Scheduler::Scheduler(const Schedule& schedule, const Limits& limits, uint64_t seed)
    : schedule_(schedule), text_(schedule.stop_rule, limits, seed) {}

Round Scheduler::begin(const std::vector<int>& prompt, int keep, int first, std::vector<float> hidden,
                       std::vector<Logprobs> logprobs) {
  Round round = text_.begin(prompt, keep, first, schedule_);
  drafted_rows_ = launched_ = int(prompt.size());
  finished_ = text_.ended();
  learn(int(prompt.size()) - 1, std::move(hidden));
  round.epoch = epoch();
  round.logprobs = std::move(logprobs);
  return round;
}

// -- draft -------------------------------------------------------------------------------------------------------------

bool Scheduler::may_step() const {
  return !finished_ && (schedule_.overlap || !in_flight()) && has_step();
}

// Is there a row to run, or a draft token to draw? (The last position before the end needs neither.)
bool Scheduler::has_step() const {
  const bool row_waits = drafted_rows_ < std::min(known(), text_.end() - 1);
  return row_waits || may_draft() || to_copy();
}

bool Scheduler::may_draft() const {
  const bool in_range = known() < text_.end() - 1;
  return in_range && !stopped_ && !drafted_end() && int(drafts_.size()) < schedule_.lookahead;
}

// What the text goes on with if it repeats itself, where drafting may go on.
std::optional<Draft> Scheduler::to_copy() const {
  return text_.next_copy(schedule_, drafts_, std::max(schedule_.lookahead, schedule_.max_chunk), stopped_);
}

int Scheduler::copy() {
  int copied = 0;
  for (; const auto draft = to_copy(); ++copied) add(*draft, text_.controller().stop_copying(draft->confidence));
  return copied;
}

void Scheduler::add(const Draft& draft, bool stops) {
  drafts_.push_back(draft);
  stopped_ = stopped_ || stops;
}

// The chance that all drafts are right, as they see it themselves.
double Scheduler::alive() const {
  double chance = 1.0;
  for (const Draft& draft : drafts_) chance *= draft.confidence;
  return chance;
}

int Scheduler::sibling_at(int position) const {
  const int place = position - text_.size();
  return place < 0 || place >= int(drafts_.size()) ? -1 : drafts_[place].sibling;
}

DraftStep Scheduler::next_step() {
  DraftStep step;
  step.copied = copy();
  step.adopted = std::exchange(for_step_, std::nullopt);
  step.start = drafted_rows_;
  for (int row = drafted_rows_; row < known(); ++row) {
    step.ids.push_back(token_at(row));
    if (sibling_at(row) >= 0) step.siblings.push_back({row, sibling_at(row)});
  }
  step.draw = may_draft();
  if (step.draw && takes_siblings()) step.sibling_bar = schedule_.siblings / std::max(alive(), 1e-9);
  step.depth = int(drafts_.size());
  step.feedback = feedback_;
  return step;
}

void Scheduler::stepped(const DraftStep& step, const Draft* draft) {
  drafted_rows_ = step.start + int(step.ids.size());
  // While the head alone was asked, a verdict may have committed the token that it drew a draft for.
  if (draft != nullptr && drafted_rows_ == known()) {
    Draft kept = *draft;
    const bool worth_it = takes_siblings() && alive() * kept.sibling_confidence >= schedule_.siblings;
    if (!worth_it || text_.is_stop(kept.sibling)) kept.sibling = -1;   // (after a stop there is nothing to know)
    add(kept, text_.controller().stop(kept.confidence));
  }
}

// -- verify ------------------------------------------------------------------------------------------------------------

// The first verification stage is free (the carrier knows); are there enough rows, or will no more come?
bool Scheduler::ready() const {
  const int pending = drafted_rows_ - launched_;
  if (finished_ || rows_ready() == 0) return false;   // rows may wait that the schedule, changed meanwhile, does not take
  const int enough = restarted_ ? schedule_.first_chunk : 0;
  return pending - int(committed_row_waits()) >= enough || !has_step();
}

// At most a chunk, and the row of the last committed token.
int Scheduler::rows_ready() const {
  return std::min(drafted_rows_ - launched_, schedule_.max_chunk + int(committed_row_waits()));
}

Chunk Scheduler::launch() {
  Chunk chunk;
  chunk.epoch = epoch();
  chunk.adopted = std::exchange(for_launch_, std::nullopt);
  chunk.start = launched_;
  const int rows = rows_ready();
  for (int row = launched_; row < launched_ + rows; ++row) {
    chunk.ids.push_back(token_at(row));
    if (sibling_at(row) < 0) continue;
    if (rows + int(chunk.siblings.size()) < kMaxRows) chunk.siblings.push_back({row, sibling_at(row)});
    else drafts_[row - text_.size()].sibling = -1;   // there is no room for it
  }
  launched_ += rows;
  restarted_ = false;
  return chunk;
}

// -- commit, roll back -------------------------------------------------------------------------------------------------

// On rows of this epoch, or on a sibling's that the last rejection spared.
std::optional<Round> Scheduler::land(const Verdict& verdict) {
  if (finished_ || is_void(verdict)) return std::nullopt;
  if (verdict.epoch != epoch()) {
    spared_ = -1;
    Round round = commit(of_the_sibling(verdict));
    round.rows = int(verdict.true_ids.size());
    round.siblings = int(verdict.siblings.size());
    return round;
  }
  return commit(verdict);
}

// True ids are committed up to and including the first that no draft token foresaw; if its sibling did, also the one that
// the sibling's row gave, where that is known already.
Round Scheduler::commit(const Verdict& verdict) {
  while (!adopted_.empty() && adopted_.front().position < verdict.start) adopted_.pop_front();
  Round round;
  round.epoch = epoch();
  round.position = verdict.start + 1;
  round.rows = int(verdict.true_ids.size());
  round.siblings = int(verdict.siblings.size());
  round.copied = int(std::count_if(drafts_.begin(), drafts_.end(), [](const Draft& draft) { return draft.copied > 0; }));
  const auto take = [&](int row) {
    finished_ = text_.append(verdict.true_ids[row]);
    round.committed.push_back(verdict.true_ids[row]);
    if (!verdict.logprobs.empty()) round.logprobs.push_back(verdict.logprobs[row]);
  };
  for (int row = 0; row < verdict.rows(); ++row) {
    const int true_id = verdict.true_ids[row];
    take(row);
    const bool foreseen = !drafts_.empty() && drafts_.front().token == true_id;
    const bool judged = !drafts_.empty();
    if (judged) {
      round.judged.push_back(drafts_.front());
      drafts_.pop_front();
      round.accepted += foreseen;
    }
    if (!foreseen || finished_) break;
  }
  const bool rejected = round.accepted < int(round.judged.size());
  const auto sibling = rejected && !finished_ ? right_sibling(verdict) : std::nullopt;
  const bool spares = rejected && !finished_ && !sibling && on_its_way(round.judged.back());
  if (sibling || spares) {
    round.rescued = true;
    adopted_.push_back({text_.size() - 1, text_.tokens().back()});
  }
  if (sibling) take(*sibling);
  if (!round.committed.empty()) {   // a pass without rows commits nothing
    const size_t width = verdict.hidden.size() / verdict.true_ids.size();
    const size_t row = sibling ? size_t(*sibling) : round.committed.size() - 1;
    learn(text_.size() - 2, {verdict.hidden.begin() + width * row, verdict.hidden.begin() + width * (row + 1)});
  }
  text_.observe(round, schedule_);
  text_.learn(schedule_);
  stopped_ = false;
  if (rejected || finished_) {
    round.dropped = int(drafts_.size());
    roll_back(spares);
  } else if (!schedule_.overlap) {
    restarted_ = true;
  }
  return round;
}

// Which of the verdict's rows is the token that was committed last, if a sibling foresaw it.
std::optional<int> Scheduler::right_sibling(const Verdict& verdict) const {
  for (int i = 0; i < int(verdict.siblings.size()); ++i) {
    const Sibling& sibling = verdict.siblings[i];
    if (sibling.position == text_.size() - 1 && sibling.id == text_.tokens().back()) return verdict.rows() + i;
  }
  return std::nullopt;
}

// Is the token that was committed last the sibling of a draft whose rows are under way?
bool Scheduler::on_its_way(const Draft& rejected) const {
  return rejected.sibling == text_.tokens().back() && launched_ >= text_.size();
}

bool Scheduler::rejects(int start, const std::vector<int>& true_ids) const {
  for (int i = 0; i < int(true_ids.size()) && start + 1 + i < known(); ++i)
    if (token_at(start + 1 + i) != true_ids[size_t(i)] || text_.is_stop(true_ids[size_t(i)])) return true;
  return false;
}

void Scheduler::learn(int position, std::vector<float> hidden) {
  if (!hidden.empty()) feedback_ = std::make_shared<const Feedback>(Feedback{position, std::move(hidden), {}});
}

// Only the rows before the last committed token are good, and that one's too if it is spared: it goes on as a sibling. A
// new epoch begins.
void Scheduler::roll_back(bool spares) {
  const int last = text_.size() - 1, good = last + int(spares);
  drafts_.clear();
  drafted_rows_ = std::min(drafted_rows_, good);
  launched_ = drafted_rows_;
  if (!adopted_.empty()) for_step_ = for_launch_ = adopted_.back();   // once more, where the first time may be void now
  restarted_ = !spares;
  ++epoch_;
  spared_ = spares ? last : -1;
}

void Scheduler::cancel() {
  finished_ = true;
  if (!text_.tokens().empty()) roll_back();
}

void Scheduler::set_schedule(const Schedule& schedule) {
  text_.change_rule(schedule_.stop_rule, schedule.stop_rule);
  schedule_ = schedule;
  text_.learn(schedule_);
}

void Scheduler::leave_siblings() {
  for (int place = std::max(launched_ - text_.size(), 0); place < int(drafts_.size()); ++place) drafts_[size_t(place)].sibling = -1;
}

bool Scheduler::drafted_end() const { return !drafts_.empty() && text_.is_stop(drafts_.back().token); }

}  // namespace ppsd
