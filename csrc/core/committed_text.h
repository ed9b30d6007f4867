// The text of one answer, and what is learned from it: when to stop drafting, what can be copied, and what copies and the
// exit head are worth here. The scheduler and the launch plan of csrc/cuda have one each.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "ngrams.h"
#include "protocol.h"
#include "schedule.h"

namespace ppsd {

class CommittedText {
 public:
  CommittedText(const StopRule& rule, const Limits& limits, uint64_t seed);
  // Without an owner: what it copies is from this text alone, and no other text finds it.
  void remember(OwnedNgrams ngrams) { ngrams_ = std::move(ngrams); }   // before begin

  // keep: rows of the prompt that an earlier answer left, which has counted their tokens.
  Round begin(const std::vector<int>& prompt, int keep, int first, const Schedule& schedule);
  bool append(int token);   // true: the answer ends here
  // After tokens were appended, or with another schedule.
  void learn(const Schedule& schedule);
  // What a verdict said of drafts.
  void observe(const Round& round, const Schedule& schedule);
  void change_rule(const StopRule& from, const StopRule& to);

  const std::vector<int>& tokens() const { return tokens_; }
  int size() const { return int(tokens_.size()); }
  int end() const { return limits_.end; }   // positions that there may be
  bool is_stop(int token) const;
  bool ended() const { return is_stop(tokens_.back()) || size() >= limits_.end; }
  Controller& controller() { return *controller_; }

  template <class Drafts>
  int token_at(const Drafts& drafts, int position) const {
    return position < size() ? tokens_[position] : drafts[size_t(position - size())].token;
  }
  // What costs no draft step after these drafts: a copy, if the exit head would not do better.
  // most: drafts that there may be. stopped: the stop rule has ended drafting.
  template <class Drafts>
  std::optional<Draft> next_copy(const Schedule& schedule, const Drafts& drafts, int most, bool stopped) const {
    const int known = size() + int(drafts.size());
    const bool room = known < limits_.end - 1 && int(drafts.size()) < most;
    if (!schedule.copies() || !room || (!drafts.empty() && is_stop(drafts.back().token))) return std::nullopt;
    return choose_copy(schedule, [&](int position) { return token_at(drafts, position); }, known, stopped);
  }

 private:
  std::optional<Draft> choose_copy(const Schedule& schedule, const Ngrams::TokenAt& at, int known, bool stopped) const;

  const Limits limits_;
  const uint64_t seed_;
  std::vector<int> tokens_;
  std::unique_ptr<Controller> controller_;
  // What was right and what had been expected to be, older ones counting less.
  struct Trust {
    double right, expected;
    double ratio() const { return right / expected; }
    void count(double chance, bool was_right);
  };
  OwnedNgrams ngrams_;
  Ngrams::Text text_;
  int counted_ = 0, seen_ = 0;  // of the text's tokens there; and of these, those that an earlier answer has counted
  std::array<Trust, 2> copies_; // from other texts, from this one: over what ngrams_ promises
  Trust head_;                  // over all of its drafts
};

}  // namespace ppsd
