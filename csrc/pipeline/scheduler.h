// The scheduler: what to draft, what to verify, what to commit. Pure state, no clock, no threads, no arithmetic.
//
// It is the loop of ppsd_rt/reference/pipeline.py turned inside out: carriers (lock-step, simulated time, threads,
// ranks) ask it what may be done now and tell it what has been done. Every answer of a stage carries the epoch of its
// question; what belongs to an older epoch is void.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include "lookup.h"
#include "protocol.h"
#include "schedule.h"
#include "successors.h"

namespace ppsd {

class Scheduler {
 public:
  Scheduler(const Schedule& schedule, const Limits& limits, uint64_t seed);

  // What usually follows, of all answers; before begin. Without it, a schedule that recycles begins to count by itself.
  void recycle(std::shared_ptr<Successors> successors) { successors_ = std::move(successors); }

  // The prompt has passed all layers, its rows from `keep` on just now; its last row is `hidden` and gave `first`.
  Round begin(const std::vector<int>& prompt, int keep, int first, std::vector<float> hidden = {},
              std::vector<Logprobs> logprobs = {});

  // The carrier tells the stages to adopt the sibling that a round was rescued by; before it is asked for anything.
  void adopts_siblings() { adopts_ = true; }

  // -- drafting: one step at a time --
  bool may_step() const;                       // a step is allowed now
  DraftStep next_step();                       // what it is; drafts that can be copied are
  bool stepped(const DraftStep& step, const Draft* draft);   // it is done; false: it was void

  // -- verifying: chunks in order, several may be under way; a verdict may be on several of them --
  bool ready() const;                          // a free verification stage may take a chunk now
  int rows_ready() const;                      // that launch() would take
  Chunk launch();                              // which rows; the hidden states are for the carrier to add
  std::optional<Round> land(const Verdict&);   // the verdict on the oldest rows under way; nullopt: it was void

  void cancel();                               // end here; only rows of the committed text stay valid
  void set_schedule(const Schedule& schedule); // from now on; drafts that stand stay

  bool finished() const { return finished_; }
  bool in_flight() const { return launched_ >= int(tokens_.size()); }   // rows whose verdict is yet to come
  uint64_t epoch() const { return epoch_.load(std::memory_order_acquire); }
  const std::atomic<uint64_t>& epoch_flag() const { return epoch_; }   // for early cancellation inside a pass
  const std::vector<int>& tokens() const { return tokens_; }
  int drafts_pending() const { return int(drafts_.size()); }
  const Schedule& schedule() const { return schedule_; }

 private:
  int known() const { return int(tokens_.size() + drafts_.size()); }
  int token_at(int position) const;
  bool has_step() const;
  bool may_draft() const;
  std::optional<Draft> to_copy() const;
  int copy();
  void add(const Draft& draft, bool stops);
  double alive() const;
  bool takes_siblings() const { return adopts_ && schedule_.siblings > 0.0 && !schedule_.overlap; }
  int sibling_at(int position) const;
  std::optional<int> right_sibling(const Verdict& verdict) const;
  bool committed_row_waits() const { return launched_ == int(tokens_.size()) - 1; }
  bool is_stop(int token) const;
  bool drafted_end() const;
  bool ended() const;
  void roll_back();
  void learn(int position, std::vector<float> hidden);
  void learn_tokens();

  Schedule schedule_;
  Limits limits_;
  std::unique_ptr<Controller> controller_;
  uint64_t seed_;
  std::vector<int> tokens_;
  std::deque<Draft> drafts_;
  std::shared_ptr<const Feedback> feedback_;
  Lookup lookup_;
  std::shared_ptr<Successors> successors_;
  int counted_ = 0;        // of the text's tokens, in successors_
  int drafted_rows_ = 0;   // rows that have passed the draft stage
  int launched_ = 0;       // rows that have been handed to verification
  std::atomic<uint64_t> epoch_{0};
  bool finished_ = false, restarted_ = true, adopts_ = false;
  bool stopped_ = false;   // the exit head is not asked any more, by the stop rule
};

}  // namespace ppsd
