// The way of verified rows to the late layers, and of what these choose back to the round.
//
// The late layers take their turn here, in the call; or they are on threads of this process (stage_threads.h), or on other ranks
// (chain.h). There a pass is sent and `verify` returns; what it has chosen is concluded when `land` finds it, in the order of sending.
// Which way it is, nobody else asks. It owns the threads and what is under way; which rows there are is the round's business.
#pragma once

#include "../stages/stage_threads.h"
#include "sequence.h"

namespace ppsd {

class RoundRunner;

// How often things happened.
struct LoopCounts {
  int64_t rounds = 0, rows = 0, draft_rows = 0, prompt_rows = 0, shared_rows = 0, preempted = 0, overlapped = 0;   // the last: passes
};

class Transport {
  using Way = Policy::Stages;

 public:
  // cuts: of the late layers, into stages on threads; none: they always take their turn. ranks: 0, or of so many this is rank 0.
  Transport(ModelBackend* backend, Blocks* blocks, RoundRunner* round, LoopCounts* counts, std::optional<std::vector<int>> cuts, int ranks,
            std::shared_ptr<Condition> condition);

  Policy::Stages may_overlap() const { return backend_.model().eagle ? Way::kNone : cuts_ ? Way::kThreads : way_; }   // where
  int verdict_track() const { return ranks_ ? kDraftTrack : kVerifyTrack; }   // of traces
  int stages() const { return sends() ? chain().stages() : 1; }   // so many passes may be under way at once
  bool sends() const { return way_ != Way::kNone; }               // do passes leave, and land later?
  bool drafts_beside() const { return way_ == Way::kThreads; }    // by one thread, while others verify
  bool room() const { return !sends() || chain().room(); }        // may a pass leave?
  bool in_flight() const { return !flights_.empty(); }
  size_t most_words() const { return ranks_ ? kPassTables : SIZE_MAX; }   // that the tables of a pass may have

  // The rows of x through the late layers, [rows][hidden], in place.
  void verify(const std::vector<Part>& parts, float* x, const Cancelled& cancelled);
  bool land();    // all that has come; false: nothing has
  bool rejected(const Sequence& answer);   // has a verdict come that voids what this one, alone in the round, is drafting?
  // It is over: what is under way of it is void. In one process nothing is, afterwards.
  void drop(const Sequence& answer);
  // In one process: this answer, which is alone, overlaps from now on; null: stages take turns. True: what was under way has landed.
  bool overlap(Sequence* alone);
  void close();   // ends threads; what is under way lands no more

  Chain* ranks() { return ranks_.get(); }             // over ranks: whose `land` another thread calls; or null

 private:
  // A pass on its way over the stages.
  struct Flight {
    uint64_t number;
    std::vector<Part> parts;
    bool alone;   // no other one had rows of these answers when it left
    Trace::Clock::time_point begun;
  };

  Chain& chain() const { return way_ == Way::kThreads ? threads_->chain() : *ranks_; }
  CpuPasses& cpu() { return dynamic_cast<CpuPasses&>(backend_); }   // that stages on threads are of
  void send(const std::vector<Part>& parts, const float* x);
  PassPart part_to_send(Part* part, PassMessage* pass);
  void conclude(const PassVerdict& verdict);
  Flight take_flight(uint64_t number);
  void drain();

  ModelBackend& backend_;
  Blocks& blocks_;
  RoundRunner& round_;
  LoopCounts& counts_;
  const std::optional<std::vector<int>> cuts_;
  const std::vector<int> cores_;                   // that stages may be pinned to
  const std::shared_ptr<Condition> condition_;
  const std::unique_ptr<Chain> ranks_;             // or null
  std::unique_ptr<StageThreads> threads_;          // from when an answer first overlaps; or null
  Way way_;                                        // kNone: the late layers take their turn here
  std::deque<Flight> flights_;                     // in order
  int numbers_ = 0;                                // of answers that stages have heard of: the last one
  std::vector<int> closed_;                        // those that are over
};

}  // namespace ppsd
