#include "simulated.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "oracle.h"

namespace ppsd {
namespace {

double least_cost(const StageCosts& costs) {
  double least = std::numeric_limits<double>::infinity();
  const auto look = [&](double cost) { least = cost > 0.0 ? std::min(least, cost) : least; };
  look(costs.row_step);
  look(costs.draft_step);
  look(costs.step(0, true));
  for (double cost : costs.steps.seconds()) look(cost);
  for (const PassCosts& stage : costs.verify) look(stage.seconds(1));
  for (double cost : costs.links) look(cost);
  look(costs.link_row);
  return least;
}

template <class Items, class IsVoid>
void erase_if(Items* items, IsVoid is_void) {
  items->erase(std::remove_if(items->begin(), items->end(), is_void), items->end());
}

}  // namespace

KnownAnswer random_answer(int tokens, const std::vector<double>& acceptance, uint64_t seed) {
  constexpr int kVocabulary = 1000;
  KnownAnswer answer;
  for (int position = 0; position < answer.prompt + 1 + tokens; ++position)
    answer.text.push_back(int(kVocabulary * coin(seed ^ 0x9E3779B97F4A7C15u, position)));
  answer.draw = [=, text = answer.text](int position, int place, bool) {
    const double chance = acceptance[std::min(size_t(place), acceptance.size() - 1)];
    return feigned(text[size_t(position)], kVocabulary, chance, seed, position);
  };
  answer.limits.end = int(answer.text.size());
  return answer;
}

void PassedRows::add(int start, const std::vector<int>& ids) {
  if (start > length_) throw std::logic_error("a message left a gap");
  length_ = start;
  right_ = std::min(right_, start);
  for (int id : ids) {
    right_ += right_ == length_ && text_->at(size_t(length_)) == id;
    ++length_;
  }
}

Simulated::Simulated(KnownAnswer answer, const Schedule& schedule, uint64_t seed, StageCosts costs, OwnedNgrams ngrams,
                     AfterRound after_round, Trace* trace)
    : answer_(std::move(answer)),
      scheduler_(schedule, answer_.limits, seed),
      costs_(std::move(costs)),
      after_round_(std::move(after_round)),
      trace_(trace),
      drafted_(&answer_.text),
      stations_(size_t(costs_.stages()), Station{PassedRows(&answer_.text), {}, std::nullopt, {}}) {
  // Sums of the same seconds in another order differ in their last bits.
  const double least = least_cost(costs_);
  tolerance_ = least < std::numeric_limits<double>::infinity() ? 1e-6 * least : 0.0;
  const std::vector<int> prompt(answer_.text.begin(), answer_.text.begin() + answer_.prompt);
  drafted_.add(0, prompt);
  for (Station& station : stations_) station.rows.add(0, prompt);
  scheduler_.remember(std::move(ngrams));
  rounds_.push_back(scheduler_.begin(prompt, 0, drafted_.next_after(answer_.prompt - 1)));
}

std::optional<Round> Simulated::next() {
  while (rounds_.empty() && !scheduler_.finished()) {
    start();
    pass_time();
    finish();
  }
  if (rounds_.empty()) return std::nullopt;
  Round round = std::move(rounds_.front());
  rounds_.pop_front();
  return round;
}

// -- the instants at which something ends ------------------------------------------------------------------------------

void Simulated::finish() {
  if (step_ && over(drafting_.left)) finish_step();
  for (int stage = int(stations_.size()) - 1; stage >= 0; --stage)
    if (stations_[stage].chunk && over(stations_[stage].work.left)) finish_chunk(stage);
  while (!replies_.empty() && over(replies_.front().travel)) land();
}

void Simulated::finish_step() {
  const DraftStep step = std::move(*step_);
  step_.reset();
  Draft draft;
  drafted_.add(step.start, step.ids);
  if (step.draw) draft = answer_.draw(drafted_.length(), step.depth, drafted_.right());
  record("draft", kDraftTrack, int(step.ids.size()), drafting_.begun);
  scheduler_.stepped(step, step.draw ? &draft : nullptr);
}

void Simulated::finish_chunk(int stage) {
  Station& station = stations_[stage];
  Chunk chunk = std::move(*station.chunk);
  station.chunk.reset();
  station.rows.add(chunk.start, chunk.ids);
  record("verify", kVerifyTrack + stage, chunk.rows(), station.work.begun);
  if (stage + 1 < int(stations_.size())) {
    const double left = travel(stage + 1, chunk.rows());
    stations_[stage + 1].inbox.push_back({std::move(chunk), left});
  } else {
    std::vector<int> true_ids;
    for (int row = chunk.start; row < chunk.start + chunk.rows(); ++row) true_ids.push_back(station.rows.next_after(row));
    Verdict verdict{chunk.epoch, chunk.start, std::move(true_ids), {}, {}};
    replies_.push_back({std::move(verdict), link(stage + 1)});
  }
}

void Simulated::land() {
  const Verdict verdict = std::move(replies_.front().verdict);
  replies_.pop_front();
  auto round = scheduler_.land(verdict);
  if (!round) return;
  if (scheduler_.epoch() != round->epoch) drop_void();
  if (after_round_) after_round_(*round, now_ - std::exchange(before_, now_), &scheduler_);
  rounds_.push_back(std::move(*round));
}

// What is under way has become void.
void Simulated::drop_void() {
  if (step_) record("dropped draft", kDraftTrack, int(step_->ids.size()), drafting_.begun);
  step_.reset();
  for (int stage = 0; stage < int(stations_.size()); ++stage) {
    Station& station = stations_[stage];
    if (station.chunk && station.chunk->epoch < scheduler_.epoch()) {
      record("dropped verify", kVerifyTrack + stage, station.chunk->rows(), station.work.begun);
      station.chunk.reset();
    }
    erase_if(&station.inbox, [this](const Message& message) { return message.chunk.epoch < scheduler_.epoch(); });
  }
  erase_if(&replies_, [this](const Reply& reply) { return reply.verdict.epoch < scheduler_.epoch(); });
}

// -- what begins -------------------------------------------------------------------------------------------------------

void Simulated::start() {
  // A chunk leaves for the first stage so that it arrives when that stage is free: what is drafted until then goes along.
  while (scheduler_.ready() && over(leave_in())) {
    Chunk chunk = scheduler_.launch();
    if (chunk.start + chunk.rows() > drafted_.length()) throw std::logic_error("rows that have not been drafted");
    const double left = travel(0, chunk.rows());
    stations_.front().inbox.push_back({std::move(chunk), left});
  }
  for (int stage = 0; stage < int(stations_.size()); ++stage) {
    Station& station = stations_[stage];
    if (station.chunk || station.inbox.empty() || !over(station.inbox.front().travel)) continue;
    station.chunk = std::move(station.inbox.front().chunk);
    station.inbox.pop_front();
    station.work = {pass(stage, station.chunk->rows()), now_};
  }
  if (!step_ && scheduler_.may_step()) {
    step_ = scheduler_.next_step();
    drafting_ = {costs_.step(int(step_->ids.size()), step_->draw), now_};
  }
}

// When the first stage will be done with what it has been sent.
double Simulated::first_stage_free_in() const {
  const Station& station = stations_.front();
  double free_in = station.chunk ? station.work.left * verify_pace() : 0.0;
  for (const Message& message : station.inbox)
    free_in = std::max(free_in, message.travel) + pass(0, message.chunk.rows());
  return free_in;
}

// What is drafted until then goes along, and takes longer on the way.
double Simulated::leave_in() const { return first_stage_free_in() - travel(0, scheduler_.rows_ready()); }

double Simulated::link(int stage) const { return costs_.links.empty() ? 0.0 : costs_.links[size_t(stage)]; }

// More rows than a pass takes go through in several.
double Simulated::pass(int stage, int rows) const {
  const RowTable& seconds = costs_.verify[size_t(stage)].seconds;
  return double(rows / kMaxRows) * seconds(kMaxRows) + (rows % kMaxRows ? seconds(rows % kMaxRows) : 0.0);
}

// Of a message of so many rows to a stage; its rows follow those of the message before it.
double Simulated::travel(int stage, int rows) const {
  const double alone = link(stage) + rows * costs_.link_row;
  const std::deque<Message>& inbox = stations_[stage].inbox;
  return inbox.empty() ? alone : std::max(alone, inbox.back().travel + rows * costs_.link_row);
}

// -- time --------------------------------------------------------------------------------------------------------------

bool Simulated::verifying() const {
  return std::any_of(stations_.begin(), stations_.end(), [](const Station& s) { return s.chunk.has_value(); });
}

double Simulated::draft_pace() const { return step_ && verifying() ? costs_.draft_interference : 1.0; }
double Simulated::verify_pace() const { return step_ && verifying() ? costs_.verify_interference : 1.0; }

// To the next instant at which something ends or arrives, or a chunk may leave.
void Simulated::pass_time() {
  const double draft_pace = this->draft_pace(), verify_pace = this->verify_pace();
  double wait = std::numeric_limits<double>::infinity();
  if (step_) wait = std::min(wait, drafting_.left * draft_pace);
  for (const Station& station : stations_) {
    if (station.chunk) wait = std::min(wait, station.work.left * verify_pace);
    else if (!station.inbox.empty()) wait = std::min(wait, station.inbox.front().travel);
  }
  if (!replies_.empty()) wait = std::min(wait, replies_.front().travel);
  if (scheduler_.ready()) wait = std::min(wait, leave_in());
  if (wait == std::numeric_limits<double>::infinity()) throw std::logic_error("the pipeline stands still");
  wait = std::max(wait, 0.0);
  now_ += wait;
  drafting_.left -= wait / draft_pace;
  for (Station& station : stations_) {
    station.work.left -= wait / verify_pace;
    for (Message& message : station.inbox) message.travel -= wait;
  }
  for (Reply& reply : replies_) reply.travel -= wait;
}

void Simulated::record(const char* name, int track, int rows, double begun) {
  if (trace_ != nullptr) trace_->add({name, track, rows, begun * 1e6, now_ * 1e6});
}

}  // namespace ppsd
