#include "admission.h"

#include <algorithm>

namespace ppsd {
namespace {

// Between two times at which consumers are woken; more for each answer. Where a consumer shares the cores with the work, each time
// costs the work 50 us, or 280 where the weights have pushed all of Python out of the caches. No reader sees the difference.
constexpr std::chrono::microseconds kFlush{25000}, kFlushOfEach{2500};

}  // namespace

void Admission::arrive(Sequences* answers) {
  for (auto& answer : *answers) answer->arrival = ++arrivals_;
  waiting_.splice(waiting_.end(), *answers);
}

Sequence* Admission::overlapping() const {
  return running_.size() == 1 && waiting_.empty() && running_.front()->overlaps() ? running_.front().get() : nullptr;
}

void Admission::admit() {
  for (;;) {
    const auto next = std::find_if(waiting_.begin(), waiting_.end(), [](const auto& a) { return !a->out->full(); });
    if (next == waiting_.end()) return;
    if (int(running_.size()) < most_ && admit(**next)) {
      const auto place = std::find_if(running_.begin(), running_.end(),
                                      [&](const auto& other) { return other->arrival > (*next)->arrival; });
      running_.splice(place, waiting_, next);
      continue;
    }
    // Answers whose consumers are slow keep nobody waiting.
    const auto slow = std::find_if(running_.begin(), running_.end(), [](const auto& a) { return a->out->full() && !a->flying; });
    if (slow == running_.end()) return;
    preempt(**slow);
  }
}

// Blocks for the text, those of others where it begins like them; and one for each of those that run, so that they need not
// make it leave again at once. There is one table of rotations.
bool Admission::admit(Sequence& answer) {
  if (!running_.empty() && running_.front()->rotated_as != answer.rotated_as) return false;
  const int wanted = answer.rows_wanted();
  const int most = answer.shareable(wanted - int(!answer.begun));
  answer.table.share(answer.text(), most);
  const int blocks = wanted / kSpan + 1 - answer.table.size();
  if (!running_.empty() && blocks_.available() < blocks + int(running_.size())) {
    answer.table.drop();
    return false;
  }
  answer.shared = answer.table.copy_rest(answer.text(), most);
  // An EAGLE-3 head's last row there has read the other text's next token.
  if (backend_.model().eagle && answer.shared % kSpan > 0) --answer.shared;
  answer.go_on_from(answer.shared);
  counts_.shared_rows += answer.shared;
  backend_.reserve(answer.request.limits.end, answer.rotated_as);
  answer.running = true;
  answer.out->begin(answer.shared);
  return true;
}

bool Admission::make_room(Sequence& answer, int rows) {
  while (!answer.table.reserve(rows)) {
    Sequence* other = victim(answer);
    if (other == nullptr && transport_.in_flight()) return false;   // what is under way may end, or give way
    preempt(other ? *other : answer);
    if (other == nullptr) return false;
  }
  return true;
}

// Who gives its blocks to `other`: one that waits for its consumer, or else the youngest; null: that is `other` itself.
Sequence* Admission::victim(const Sequence& other) const {
  Sequence* youngest = nullptr;
  for (const auto& answer : running_) {
    if (answer->flying) continue;
    if (answer.get() != &other && answer->out->full()) return answer.get();
    youngest = answer.get();
  }
  return youngest == &other ? nullptr : youngest;
}

// Its blocks are free, its tokens stay: its rows will be computed again, to the same bits.
void Admission::preempt(Sequence& answer) {
  ++counts_.preempted;
  answer.table.drop();
  if (answer.begun) answer.scheduler.forget_drafts();   // of when it overlapped
  answer.go_on_from(0);
  answer.running = false;
  const auto here = std::find_if(running_.begin(), running_.end(), [&](const auto& a) { return a.get() == &answer; });
  const auto place = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& a) { return a->arrival > answer.arrival; });
  waiting_.splice(place, running_, here);
}

void Admission::retire(const std::function<void()>& told) {
  for (Sequences* answers : {&waiting_, &running_}) {
    for (auto at = answers->begin(); at != answers->end();) {
      Sequence& answer = **at;
      if (answer.begun && answer.scheduler.finished()) answer.over = true;
      if (!answer.over && !answer.out->cancelled()) {
        ++at;
        continue;
      }
      answer.out->kept = backend_.kept(answer.table.pointers(), answer.rows);
      transport_.drop(answer);
      if (answer.failure) answer.table.wipe();   // NaNs must not reach the next owner
      else retire(answer);
      told();
      answer.out->finish(answer.failure);
      at = answers->erase(at);
    }
  }
}

// Its rows stay for texts that begin like its own.
void Admission::retire(Sequence& answer) {
  if (!answer.running || answer.rows == 0) return;
  answer.cut(answer.rows);   // a pass may have been cancelled, or is under way
  answer.prefill_head();
  if (backend_.model().eagle) answer.read_taps_from(answer.rows);
  answer.table.leave(answer.text(), answer.shareable(answer.rows));
}

void Admission::end_all(const std::exception_ptr& failure) {
  for (Sequences* answers : {&waiting_, &running_}) {
    for (auto& answer : *answers) {
      answer->out->finish(failure);
      transport_.drop(*answer);
    }
    answers->clear();
  }
}

// All together: each consumer that wakes takes a core from a member of the team, for which the others wait.
void Admission::wake_consumers() {
  const auto now = Trace::Clock::now();
  if (now - woken_ < kFlush + (int(running_.size()) - 1) * kFlushOfEach) return;
  woken_ = now;
  for (const Sequences* answers : {&running_, &waiting_})
    for (const auto& answer : *answers) answer->out->tell();
}

}  // namespace ppsd
