// What to launch next on a GPU, and what its verdicts mean: the scheduler of captured stages.
//
// On a CPU the scheduler (csrc/core/scheduler.h) hands out every draft step and every chunk, and waits for what comes
// back. On a GPU that would cost a round trip each. There the draft tokens, the rows of a pass, the rolling back and the
// epoch live in device memory (triton_kernels/verdict.py), and a launch takes what stands there when it begins; so
// launches can be queued before anything is known of the ones before them. The plan decides their order and number:
//
// - without overlap, a round is some draft steps, the row of the last draft token, and a verification pass, all in one
//   order. Rounds are queued ahead of their predecessors' verdicts: whatever those say, the next round begins where
//   they end. Only how *many* draft steps it has is decided on what was known when it was queued. Where that number
//   needs no confidences and was captured, the whole round is one launch.
// - with overlap, draft steps are queued on a stream of their own, a few ahead, while a pass runs. The next pass is
//   queued as soon as a verification stage is free for it: after the first draft step that surely gives it a row, or
//   after as many as the schedule wants to wait for. After a rejection that is a step that surely began after it.
//
//     phase       next() queues                                   and goes to
//     kIdle       a whole round as one launch                     kIdle
//                 or opens a round                                kDrafting
//     kDrafting   a draft step, until the stop rule has spoken    kDrafting
//                 then the last draft's row                       kRowQueued
//     kRowQueued  the pass                                        kIdle
//     kFresh      draft steps; the epoch's first pass             kFlowing
//     kFlowing    draft steps and passes                          kFresh, at a rejection
//
// Copies (csrc/core/ngrams.h): what may be drafted without the exit head is decided here, on the text
// that verdicts have told, and offered to the device, which takes it when a draft step or a row begins: as far as the
// text there agrees, and as far as there is room. An offer that comes late, or half, is only a draft that is missing or
// wrong. So that it need not come late, no round is queued ahead of the verdict while the text repeats itself.
//
// Pure state: no clock, no driver. The carrier (carrier.h) asks it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../core/committed_text.h"
#include "../core/protocol.h"
#include "../core/schedule.h"
#include "../core/ngrams.h"

namespace ppsd::cuda {

// What a pass published: the fields of its record in the ring (record.h).
struct Record {
  int epoch = 0, position = 0, rows = 0;   // position: of the first token that it could commit
  int accepted = 0;
  int copied = 0;                          // of the drafts in the pass: those that were copied
  std::vector<int> committed;              // empty: the pass was void
  std::vector<Draft> judged;
};

// Drafts for the device to take.
struct Offer {
  int position = 0;            // of the first; the text before it is committed
  std::vector<Draft> drafts;   // at most kMaxChunk; those that the head has drawn stand among them, as far as they are known
  int most = 0;                // drafts that there may be beyond the committed text
};

struct Step {
  // kRow: the early layers alone, no draft token is drawn. kRound: draft steps, the last one's row, and a pass.
  enum class Kind { kWait, kDraft, kRow, kVerify, kRound };
  Kind kind = Kind::kWait;
  int64_t after_draft = -1;    // begins when this draft launch is complete (they are counted from 0, rows among them),
  int64_t after_pass = -1;     // and this pass
  int first_row = 0, rows = 0; // of a pass: its rows stand among these
  int drafts = 0;              // of a round
};

class Plan {
 public:
  static constexpr int kRoundsAhead = 3;   // rounds in flight: one runs, and the host has two to answer in;
  static constexpr int kPlannedAhead = 2;  // fewer where every round may change the schedule, or find a copy
  static constexpr int kDraftsAhead = 4;   // draft steps in flight while a pass overlaps with them

  // stages: of verification; with overlap, each may hold a pass. whole: bit K: K drafts and their pass can be one launch.
  // ngrams: what is copied from.
  Plan(const Schedule& schedule, const Limits& limits, uint64_t seed, int stages = 1, uint32_t whole = 0,
       OwnedNgrams ngrams = {});

  // The prompt has passed all layers, its rows from `keep` on just now, and its last row gave `first`.
  Round begin(const std::vector<int>& prompt, int keep, int first);

  // What to queue now; it counts as launched. drafts_done: draft launches that are known to be complete.
  Step next(int64_t drafts_done);
  // The verdict of the oldest pass in flight.
  std::optional<Round> land(const Record& record, int64_t drafts_done);
  // The draft launch whose draft the stop rule asks for, or -1; what to say if it drew no token: nothing.
  int64_t wants_confidence() const;
  void drafted(const std::optional<Draft>& draft, int position = -1);
  // What the device is to be offered from now on, if that has changed since the last time: before the next launch.
  std::optional<Offer> take_offer() { return std::exchange(offer_, std::nullopt); }

  void cancel() { finished_ = true; }
  void set_schedule(const Schedule& schedule);   // for the next rounds

  bool finished() const { return finished_; }
  int passes_in_flight() const { return int(flights_.size()); }
  int64_t drafts_launched() const { return launched_; }   // a whole round counts as one
  int64_t passes_launched() const { return passes_; }
  const std::vector<int>& tokens() const { return text_.tokens(); }
  const Schedule& schedule() const { return pending_ ? *pending_ : schedule_; }   // the one set last
  bool overlapping() const { return schedule_.overlap; }                          // the one at work

 private:
  Step next_in_turns();
  Step next_overlapped(int64_t drafts_done);
  Step draft(Step::Kind kind);
  Step pass(int64_t after_draft, int rows);
  bool needs_confidence() const;
  void adopt(const Schedule& schedule);
  void adopt_pending();
  bool open() const { return phase_ == Phase::kDrafting || phase_ == Phase::kRowQueued; }
  void begin_again(int64_t drafts_done);
  int most_standing() const { return std::min(std::max(schedule_.lookahead, schedule_.max_chunk), kMaxChunk); }
  std::optional<Draft> to_copy() const { return text_.next_copy(schedule_, standing_, most_standing(), stopped_); }
  void copy();
  void look();

  // Without overlap of the round that is being queued, with overlap of the epoch.
  enum class Phase { kIdle, kDrafting, kRowQueued, kFresh, kFlowing };

  Schedule schedule_;
  std::optional<Schedule> pending_;        // overlap goes on or off when nothing is in flight
  const int stages_;
  const uint32_t whole_;
  CommittedText text_;
  bool finished_ = false;
  int64_t launched_ = 0, passes_ = 0;      // draft launches, rows among them; passes
  std::deque<int> flights_;                // of each pass in flight: the most rows of this epoch that it may hold
  bool stopped_ = false;                   // the stop rule has spoken
  int64_t asked_ = 0;                      // draft launches that the stop rule has been asked about

  Phase phase_;
  int drafts_ = 0;                         // draft steps of the round that is being queued
  int64_t judged_ = 0;                     // with overlap: draft launches from here on surely give rows that await a verdict

  std::vector<Draft> standing_;            // beyond the committed text: copies that were offered, and what the head told
  std::optional<Offer> offer_;             // not taken yet
  bool offering_ = false;                  // the last one had drafts
  bool repeats_ = false;                   // the text that verdicts have told goes on with a copy
  bool look_again_ = false;                // with overlap: a verdict has come since the last offer

};

}  // namespace ppsd::cuda
