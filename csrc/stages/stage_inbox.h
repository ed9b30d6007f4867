// A verification stage of its own process, or in a thread of its own: passes come in, and leave for the next stage, or as verdicts for rank 0.
//
// While it works on one, others come, and say what is void by now: rows of an answer whose epoch has been raised, or that is
// over. It drops these, ends a pass at the next layer if nothing else is in it, and sends what is left on, in order. Passes of
// an answer that has the stages to itself become one while they wait, where rank 0 allows it: only here is it known that the
// stage is free.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "../core/trace.h"
#include "pass.h"

namespace ppsd {

class StageInbox {
 public:
  using Clock = std::chrono::steady_clock;
  // The rows through the layers, in place; verdict: what they choose, of the last stage. False: cancelled on the way.
  using Run = std::function<bool(PassMessage* pass, const Cancelled& cancelled, PassVerdict* verdict)>;

  // last: it has the LM head and gives verdicts. taps: of an EAGLE-3 head, that rows bring along.
  StageInbox(Run run, int hidden, bool last, int taps = 0) : run_(std::move(run)), hidden_(hidden), taps_(taps), last_(last) {}

  // From the thread that receives. Throws std::runtime_error for what does not follow the protocol.
  void post(const int32_t* message, size_t words) { post(read_pass(message, words, hidden_, taps_)); }
  void post(PassMessage pass);
  // What the next message would say of this answer, before there is one: which rows are void, see PassPart.
  void raise(int answer, int epoch);
  // From the thread that computes: waits for a pass, at most so long, and works on it. Words of the message for the next
  // stage, or for rank 0, in out[most_pass_words]; 0: none came. Throws what `run` does.
  size_t work(int32_t* out, int milliseconds);
  // Likewise: what is left of it, and of the last stage its verdict. milliseconds: -1: until it is closed, and then it is false.
  bool work(PassMessage* pass, PassVerdict* verdict, int milliseconds = -1);
  void close();

  double busy_seconds() const;   // since when the pass at hand goes on; 0: there is none
  int64_t passes() const { return passes_; }   // that were not dropped
  std::shared_ptr<const Trace> trace() const;   // of the last answers that began with one, on the wire_clock(); or null

 private:
  bool take_locked(PassMessage* pass);
  void raise_locked(int answer, int epoch);
  void end_void_locked();
  bool joins_locked(const PassMessage& pass, const PassMessage& next) const;
  bool is_void_locked(const PassPart& part) const;
  void count(const PassMessage& pass, int rows, bool done, Clock::time_point begun);

  const Run run_;
  const int hidden_, taps_;
  const bool last_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<PassMessage> inbox_;
  std::map<int, int> newest_;            // epochs of answers, as the last message said
  std::vector<PassPart> at_hand_;        // of the pass that is worked on: answers, epochs and first rows alone
  std::atomic<bool> void_{false};        // all of these are void
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> busy_since_{0};
  std::atomic<int64_t> passes_{0};
  std::shared_ptr<Trace> trace_;
};

}  // namespace ppsd
