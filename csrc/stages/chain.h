// The late layers on other ranks, or on threads of their own, seen from the loop: passes go out, verdicts come back in the same order.
//
// As many passes are under way as there are stages, each with answers of its own, so no pass waits for what another one commits.
// Where answers are fewer than stages, they may have several under way: see RoundRunner::choose.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../loop/answer_events.h"
#include "pass.h"

namespace ppsd {

class Chain {
 public:
  // stages: rank 0's too. taps: of an EAGLE-3 head, that verdicts bring home. condition: notified when a verdict has come.
  Chain(int stages, int hidden, int taps, std::shared_ptr<Condition> condition)
      : stages_(stages), hidden_(hidden), taps_(taps), condition_(std::move(condition)) {}

  // -- for the loop --
  int stages() const { return stages_; }
  bool room() const { return sent_ - known_ < uint64_t(stages_); }
  uint64_t send(PassMessage pass) {   // its number
    pass.number = ++sent_;
    out_.push_back(std::move(pass));
    return sent_;
  }
  std::optional<PassVerdict> landed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    if (in_.empty()) return std::nullopt;
    PassVerdict verdict = std::move(in_.front());
    in_.pop_front();
    known_ = verdict.number;
    return verdict;
  }
  // Of those that have come and that `landed` has not given yet, in order, until `look` says that it has seen enough.
  bool any(const std::function<bool(const PassVerdict&)>& look) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(in_.begin(), in_.end(), look);
  }
  std::optional<PassMessage> take() {   // that is to leave
    if (out_.empty()) return std::nullopt;
    PassMessage pass = std::move(out_.front());
    out_.pop_front();
    return pass;
  }

  // -- from the thread that receives. Throws std::runtime_error for what does not follow the protocol. --
  void land(const int32_t* message, size_t words) { land(read_verdict(message, words, hidden_, taps_)); }
  void land(PassVerdict verdict) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (verdict.number <= landed_) throw std::runtime_error("a verdict came out of turn");
      landed_ = verdict.number;
      in_.push_back(std::move(verdict));
    }
    condition_->notify();
  }
  void fail(std::exception_ptr failure) {   // nothing lands any more
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure_ = std::move(failure);
    }
    condition_->notify();
  }

 private:
  const int stages_, hidden_, taps_;
  const std::shared_ptr<Condition> condition_;
  uint64_t sent_ = 0, known_ = 0;   // the last pass, and the last one whose verdict the loop has
  uint64_t landed_ = 0;             // the last one whose verdict has come
  std::deque<PassMessage> out_;
  std::mutex mutex_;
  std::deque<PassVerdict> in_;
  std::exception_ptr failure_;
};

}  // namespace ppsd
