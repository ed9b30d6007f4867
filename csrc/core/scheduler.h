// The scheduler: what to draft, what to verify, what to commit. Pure state, no clock, no threads, no arithmetic.
//
// Carriers (the loop of answers, simulated time) ask it what may be done now and tell it what has been done. Every answer of a
// stage carries the epoch of its question; what belongs to an older epoch is void.
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
  void leave_siblings();                       // no rows from now on for those that have not been launched
  void forget_drafts() { roll_back(); }        // those that stand, and what is under way
  void set_schedule(const Schedule& schedule); // from now on; drafts that stand stay

  bool finished() const { return finished_; }
  bool in_flight() const { return launched_ >= text_.size(); }   // rows whose verdict is yet to come
  // Every rejection raises the epoch, and work of an older one is void. But for one piece: where the rejected draft's sibling
  // is the right token and is under way, the rows that it rides with go on.
  uint64_t epoch() const { return epoch_; }
  int spared() const { return spared_; }   // the first of these rows; -1: there are none
  template <class Rows>
  bool is_void(const Rows& rows) const { return rows.epoch < epoch_ && !(rows.epoch + 1 == epoch_ && rows.start == spared_); }
  const std::vector<int>& tokens() const { return text_.tokens(); }
  int drafted_rows() const { return drafted_rows_; }   // those that have passed the draft stage
  int sibling_at(int position) const;          // its id, where the draft for that position has one; else -1
  const Sibling& adopted() const { return adopted_.back(); }   // the newest one, after a round that was rescued
  const Schedule& schedule() const { return schedule_; }

 private:
  int known() const { return text_.size() + int(drafts_.size()); }
  int token_at(int position) const { return text_.token_at(drafts_, position); }
  bool has_step() const;
  bool may_draft() const;
  std::optional<Draft> to_copy() const;
  int copy();
  void add(const Draft& draft, bool stops);
  double alive() const;
  bool takes_siblings() const { return schedule_.siblings > 0.0 && int(drafts_.size()) < kSiblingDrafts; }
  Round commit(const Verdict& verdict);
  std::optional<int> right_sibling(const Verdict& verdict) const;
  bool on_its_way(const Draft& rejected) const;
  bool committed_row_waits() const { return launched_ == text_.size() - 1; }
  bool drafted_end() const;
  void roll_back(bool spares = false);
  void learn(int position, std::vector<float> hidden);

  Schedule schedule_;
  CommittedText text_;
  std::deque<Draft> drafts_;
  std::shared_ptr<const Feedback> feedback_;
  // The siblings that are the text's rows now, until a verdict on rows after them: all stages have been told then. The
  // newest one is told with the next step, and with the next rows to be verified.
  std::deque<Sibling> adopted_;
  std::optional<Sibling> for_step_, for_launch_;
  int drafted_rows_ = 0;   // rows that have passed the draft stage
  int launched_ = 0;       // rows that have been handed to verification
  uint64_t epoch_ = 0;
  int spared_ = -1;
  bool finished_ = false, restarted_ = true;
  bool stopped_ = false;   // the exit head is not asked any more, by the stop rule
};

}  // namespace ppsd
