#include "scheduler.h"

#include <algorithm>
#include <utility>

namespace ppsd {

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

DraftStep Scheduler::next_step() {
  DraftStep step;
  step.copied = copy();
  step.start = drafted_rows_;
  for (int row = drafted_rows_; row < known(); ++row) step.ids.push_back(token_at(row));
  step.draw = may_draft();
  step.depth = int(drafts_.size());
  step.feedback = feedback_;
  return step;
}

void Scheduler::stepped(const DraftStep& step, const Draft* draft) {
  drafted_rows_ = step.start + int(step.ids.size());
  // While the head alone was asked, a verdict may have committed the token that it drew a draft for.
  if (draft != nullptr && drafted_rows_ == known()) add(*draft, text_.controller().stop(draft->confidence));
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
  chunk.start = launched_;
  const int rows = rows_ready();
  for (int row = launched_; row < launched_ + rows; ++row) chunk.ids.push_back(token_at(row));
  launched_ += rows;
  restarted_ = false;
  return chunk;
}

// -- commit, roll back -------------------------------------------------------------------------------------------------

// True ids are committed up to and including the first that no draft token foresaw.
std::optional<Round> Scheduler::land(const Verdict& verdict) {
  if (finished_ || verdict.epoch != epoch()) return std::nullopt;
  Round round;
  round.epoch = epoch();
  round.position = verdict.start + 1;
  round.rows = int(verdict.true_ids.size());
  round.copied = int(std::count_if(drafts_.begin(), drafts_.end(), [](const Draft& draft) { return draft.copied > 0; }));
  for (const int true_id : verdict.true_ids) {
    finished_ = text_.append(true_id);
    round.committed.push_back(true_id);
    const bool foreseen = !drafts_.empty() && drafts_.front().token == true_id;
    if (!drafts_.empty()) {
      round.judged.push_back(drafts_.front());
      drafts_.pop_front();
      round.accepted += foreseen;
    }
    if (!foreseen || finished_) break;
  }
  if (const size_t count = round.committed.size(); count > 0) {   // a pass without rows commits nothing
    if (!verdict.logprobs.empty()) round.logprobs.assign(verdict.logprobs.begin(), verdict.logprobs.begin() + ptrdiff_t(count));
    const size_t width = verdict.hidden.size() / verdict.true_ids.size();
    learn(text_.size() - 2, {verdict.hidden.begin() + width * (count - 1), verdict.hidden.begin() + width * count});
  }
  text_.observe(round, schedule_);
  text_.learn(schedule_);
  stopped_ = false;
  if (round.accepted < int(round.judged.size()) || finished_) {
    round.dropped = int(drafts_.size());
    roll_back();
  } else if (!schedule_.overlap) {
    restarted_ = true;
  }
  return round;
}

bool Scheduler::rejects(int start, const std::vector<int>& true_ids) const {
  for (int i = 0; i < int(true_ids.size()) && start + 1 + i < known(); ++i)
    if (token_at(start + 1 + i) != true_ids[size_t(i)] || text_.is_stop(true_ids[size_t(i)])) return true;
  return false;
}

void Scheduler::learn(int position, std::vector<float> hidden) {
  if (!hidden.empty()) feedback_ = std::make_shared<const Feedback>(Feedback{position, std::move(hidden), {}});
}

// Only the rows before the last committed token are good. A new epoch begins.
void Scheduler::roll_back() {
  drafts_.clear();
  drafted_rows_ = std::min(drafted_rows_, text_.size() - 1);
  launched_ = drafted_rows_;
  restarted_ = true;
  ++epoch_;
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

bool Scheduler::drafted_end() const { return !drafts_.empty() && text_.is_stop(drafts_.back().token); }

}  // namespace ppsd
