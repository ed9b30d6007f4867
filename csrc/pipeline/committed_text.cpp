#include "committed_text.h"

#include <utility>

namespace ppsd {

CommittedText::CommittedText(const StopRule& rule, const Limits& limits, uint64_t seed, std::shared_ptr<Successors> successors)
    : limits_(limits), seed_(seed), controller_(Controller::make(rule, seed)), successors_(std::move(successors)) {}

Round CommittedText::begin(const std::vector<int>& prompt, int keep, int first, const Schedule& schedule) {
  tokens_ = prompt;
  tokens_.push_back(first);
  counted_ = keep + int(keep > 0);
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
  if (schedule.lookup > 0) lookup_.learn(tokens_, schedule.lookup);
  if (schedule.recycle && !successors_) successors_ = std::make_shared<Successors>();
  if (!schedule.recycle) return;
  successors_->learn(tokens_, counted_);
  counted_ = size();
}

void CommittedText::observe(const Round& round, const Schedule& schedule) {
  std::vector<Judged> judged;
  for (int i = 0; i < int(round.judged.size()); ++i)
    if (round.judged[i].copied == 0) judged.push_back({round.judged[i].confidence, i < round.accepted});
  controller_->observe(judged);
  if (schedule.copies()) lookup_.observe(round.judged, round.accepted);
  if (schedule.recycle) successors_->observe(round.judged, round.accepted);
}

void CommittedText::change_rule(const StopRule& from, const StopRule& to) {
  const bool same = from.kind == to.kind && from.discount == to.discount && from.bins == to.bins && from.weight == to.weight;
  if (!same) controller_ = Controller::make(to, seed_);
  controller_->set_thresholds(to);
}

bool CommittedText::is_stop(int token) const {
  return std::find(limits_.stop_ids.begin(), limits_.stop_ids.end(), token) != limits_.stop_ids.end();
}

std::optional<Draft> CommittedText::choose_copy(const Schedule& schedule, const Lookup::TokenAt& at, int known,
                                                bool stopped) const {
  auto copy = schedule.lookup > 0 ? lookup_.propose(at, known) : std::nullopt;
  const auto usual = schedule.recycle ? successors_->propose(at, known) : std::nullopt;
  if (usual && (!copy || usual->confidence > copy->confidence)) copy = usual;
  if (!copy || !controller_->may_copy(copy->confidence, stopped)) return std::nullopt;
  const bool head_is_better = schedule.lookahead > 0 && !lookup_.beats_head(copy->confidence);
  return head_is_better ? std::nullopt : copy;
}

}  // namespace ppsd
