// Who runs: the answers that wait and those that run, both in order of arrival.
//
// It owns them, and hands out the blocks that their texts lie in: who is admitted, who gives way, what stays of a text for others.
// What those that run compute is the round's business (round.h).
#pragma once

#include "transport.h"

namespace ppsd {

class Admission {
 public:
  // most: that run at once.
  Admission(ModelBackend* backend, Blocks* blocks, Transport* transport, LoopCounts* counts, int most)
      : backend_(*backend), blocks_(*blocks), transport_(*transport), counts_(*counts), most_(most) {}

  const Sequences& running() const { return running_; }
  bool empty() const { return waiting_.empty() && running_.empty(); }
  void arrive(Sequences* answers);   // which wait from now on
  Sequence* overlapping() const;     // the one that there is, if it would draft while it is verified; or null
  void admit();                      // as many as blocks allow
  // Blocks for so many rows of its text; false: it has to wait, or does not run any more. Others may not either.
  bool make_room(Sequence& answer, int rows);
  // Those that are over leave. told: before they are told so.
  void retire(const std::function<void()>& told);
  void end_all(const std::exception_ptr& failure);
  void wake_consumers();             // at most every 25 ms

 private:
  bool admit(Sequence& answer);
  void preempt(Sequence& answer);
  Sequence* victim(const Sequence& other) const;
  void retire(Sequence& answer);

  ModelBackend& backend_;
  Blocks& blocks_;
  Transport& transport_;
  LoopCounts& counts_;
  const int most_;
  Sequences waiting_, running_;
  uint64_t arrivals_ = 0;
  Trace::Clock::time_point woken_{};   // when consumers were, last
};

}  // namespace ppsd
