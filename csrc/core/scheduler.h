// The scheduler: what to draft, what to verify, what to commit. Pure state, no clock, no threads, no arithmetic.
//
// The loop of answers asks it what may be done now and tells it what has been done. Every answer of a stage carries the epoch of its question; what belongs to an older epoch is void.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>

#include "committed_text.h"
#include "protocol.h"
#include "schedule.h"

namespace ppsd {

class Scheduler {
 public:
  Scheduler(const Schedule& schedule, const Limits& limits, uint64_t seed);

  // What it copies from; before begin. Without it, that is its own text.
  void remember(OwnedNgrams ngrams) { text_.remember(std::move(ngrams)); }

  // The prompt has passed all layers, its rows from `keep` on just now; its last row is `hidden` and gave `first`.
  Round begin(const std::vector<int>& prompt, int keep, int first, std::vector<float> hidden = {},
              std::vector<Logprobs> logprobs = {});

  // -- drafting: one step at a time --
  bool may_step() const;                       // a step is allowed now
  DraftStep next_step();                       // what it is; drafts that can be copied are
  void stepped(const DraftStep& step, const Draft* draft);   // it is done, and no rollback came meanwhile

  // -- verifying: chunks in order, several may be under way; a verdict may be on several of them --
  bool ready() const;                          // a free verification stage may take a chunk now
  int rows_ready() const;                      // that launch() would take
  Chunk launch();                              // which rows; the hidden states are for the carrier to add
  std::optional<Round> land(const Verdict&);   // the verdict on the oldest rows under way; nullopt: it was void

  // Would a verdict on the rows from `start` on, of this epoch, make drafts void?
  bool rejects(int start, const std::vector<int>& true_ids) const;

  void cancel();                               // end here; only rows of the committed text stay valid
  void forget_drafts() { roll_back(); }        // those that stand, and what is under way
  void set_schedule(const Schedule& schedule); // from now on; drafts that stand stay

  bool finished() const { return finished_; }
  bool in_flight() const { return launched_ >= text_.size(); }   // rows whose verdict is yet to come
  uint64_t epoch() const { return epoch_; }   // every rejection raises it, and work of an older one is void
  const std::vector<int>& tokens() const { return text_.tokens(); }
  int drafted_rows() const { return drafted_rows_; }   // those that have passed the draft stage
  const Schedule& schedule() const { return schedule_; }

 private:
  int known() const { return text_.size() + int(drafts_.size()); }
  int token_at(int position) const { return text_.token_at(drafts_, position); }
  bool has_step() const;
  bool may_draft() const;
  std::optional<Draft> to_copy() const;
  int copy();
  void add(const Draft& draft, bool stops);
  bool committed_row_waits() const { return launched_ == text_.size() - 1; }
  bool drafted_end() const;
  void roll_back();
  void learn(int position, std::vector<float> hidden);

  Schedule schedule_;
  CommittedText text_;
  std::deque<Draft> drafts_;
  std::shared_ptr<const Feedback> feedback_;
  int drafted_rows_ = 0;   // rows that have passed the draft stage
  int launched_ = 0;       // rows that have been handed to verification
  uint64_t epoch_ = 0;
  bool finished_ = false, restarted_ = true;
  bool stopped_ = false;   // the exit head is not asked any more, by the stop rule
};

}  // namespace ppsd
