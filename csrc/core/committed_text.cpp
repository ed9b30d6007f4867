#include "committed_text.h"

#include <utility>

namespace ppsd {
namespace {

constexpr double kWeight = 4.0;      // drafts that a prior counts as
constexpr double kDiscount = 0.98;   // what older ones of the same source keep at each
constexpr double kHead = 0.5;        // prior of the exit head
constexpr size_t kBytesOfToken = 256;   // of an index of one text alone: half of it stays empty
constexpr size_t kBytesAlone = size_t(4) << 20;   // at most: there are as many as answers

}  // namespace

CommittedText::CommittedText(const StopRule& rule, const Limits& limits, uint64_t seed)
    : limits_(limits),
      seed_(seed),
      controller_(Controller::make(rule, seed)),
      copies_{Trust{kWeight, kWeight}, Trust{kWeight, kWeight}},
      head_{kHead * kWeight, kWeight} {}

void CommittedText::Trust::count(double chance, bool was_right) {
  right = kDiscount * right + was_right;
  expected = kDiscount * expected + chance;
}

Round CommittedText::begin(const std::vector<int>& prompt, int keep, int first, const Schedule& schedule) {
  tokens_ = prompt;
  tokens_.push_back(first);
  seen_ = keep + int(keep > 0);
  learn(schedule);
  Round round;
  round.position = int(prompt.size());
  round.rows = int(prompt.size()) - keep;
  round.committed = {first};
  round.prompt = true;
  return round;
}

bool CommittedText::append(int token) {
  tokens_.push_back(token);
  return ended();
}

void CommittedText::learn(const Schedule& schedule) {
  if (!schedule.copies()) return;
  if (!ngrams_.all || !ngrams_.owner) {
    auto alone = std::make_shared<Ngrams>(std::min(size_t(limits_.end) * kBytesOfToken, kBytesAlone));
    if (ngrams_.all) alone->know_as(*ngrams_.all);
    ngrams_ = {std::move(alone), 0};
  }
  if (text_.number == 0) text_ = ngrams_.all->begin(*ngrams_.owner);
  ngrams_.all->learn(tokens_, counted_, seen_, text_);
  counted_ = size();
}

// Every committed token says what a copy would have been worth there, whether it was drafted or not.
void CommittedText::observe(const Round& round, const Schedule& schedule) {
  std::vector<Judged> judged;
  for (int i = 0; i < int(round.judged.size()); ++i) {
    if (round.judged[size_t(i)].copied > 0) continue;
    judged.push_back({round.judged[size_t(i)].confidence, i < round.accepted});
  }
  controller_->observe(judged);
  if (text_.number == 0) return;
  for (const Judged& draft : judged) head_.count(1.0, draft.accepted);
  if (!schedule.copies()) return;
  const auto at = [&](int position) { return tokens_[size_t(position)]; };
  for (int position = round.position; position < size(); ++position) {
    const auto copy = ngrams_.all->propose(at, position, text_, schedule.lookup, schedule.recycle);
    if (!copy) continue;
    const bool right = copy->token == tokens_[size_t(position)];
    copies_[Ngrams::from_own_text(copy->copied)].count(copy->confidence, right);
    ngrams_.all->observe(copy->copied, right);
  }
}

void CommittedText::change_rule(const StopRule& from, const StopRule& to) {
  const bool same = from.kind == to.kind && from.discount == to.discount && from.bins == to.bins && from.weight == to.weight;
  if (!same) controller_ = Controller::make(to, seed_);
  controller_->set_thresholds(to);
}

bool CommittedText::is_stop(int token) const {
  return std::find(limits_.stop_ids.begin(), limits_.stop_ids.end(), token) != limits_.stop_ids.end();
}

std::optional<Draft> CommittedText::choose_copy(const Schedule& schedule, const Ngrams::TokenAt& at, int known,
                                                bool stopped) const {
  auto copy = text_.number == 0 ? std::nullopt : ngrams_.all->propose(at, known, text_, schedule.lookup, schedule.recycle);
  if (!copy) return std::nullopt;
  copy->confidence = std::clamp(copy->confidence * copies_[Ngrams::from_own_text(copy->copied)].ratio(), 0.0, 0.99);
  if (!controller_->may_copy(copy->confidence, stopped)) return std::nullopt;
  const bool head_is_better = schedule.lookahead > 0 && !stopped && copy->confidence < head_.ratio();
  return head_is_better ? std::nullopt : copy;
}

}  // namespace ppsd
