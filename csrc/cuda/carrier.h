// The carrier of captured stages: CUDA graphs launched on one stream per stage, verdicts read from mapped memory.
//
// The plan (plan.h) says what to queue; here it is queued, in its order on the device: every launch is followed by the
// record of an event of its own, and whoever must run after it on another stream waits for that event. In turns on one
// device there is one stream and no event: a launch is over when the verdict on its round has come. Nothing waits on the
// host but for verdicts, and for those it looks into memory that the device writes.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include "../core/trace.h"
#include "lanes.h"
#include "plan.h"
#include "record.h"

namespace ppsd::cuda {

// What a stage hands to one on another device: rows, each at its position, or a block of words.
struct Copy {
  Address to = 0, from = 0;        // of position 0
  int to_device = 0, from_device = 0;
  size_t row_bytes = 0;
  int rows = 0;                    // positions that there are; 0: row_bytes are copied as they are
};

// One model's captured stages and what they write. The graphs and the memory belong to the caller.
struct Graphs {
  GraphExec draft = nullptr, row = nullptr;      // a draft step; the early layers without the exit head
  std::vector<GraphExec> rounds;                 // by number of drafts: these, the row and the pass as one; may be null
  std::vector<GraphExec> verify;                 // a pass: its legs (ppsd_rt/cuda/devices.py), one for each stage

  uint32_t whole_rounds() const {   // as Plan takes them
    uint32_t bits = 0;
    for (size_t drafts = 0; drafts < rounds.size(); ++drafts) bits |= uint32_t(rounds[drafts] != nullptr) << drafts;
    return bits;
  }
  // A pass has legs before its stages, the taking of rows, and after them, the verdict.
  bool take_apart = false, verdict_apart = false;
  std::vector<std::vector<Copy>> copies;         // before each leg; within one device none is needed, and none made
  Ring verdicts, drafts;
  int32_t* offer = nullptr;                      // what the device may draft of itself (record.h)
  int32_t sequence = 0, drawn = 0;               // numbers of the last records
  bool draft_records = false;                    // do draft steps leave records?

  int stages() const { return int(verify.size()) - int(take_apart) - int(verdict_apart); }
};

class GraphCarrier {
 public:
  using AfterRound = std::function<void(const Round&, Plan*)>;

  GraphCarrier(Lanes* lanes, Graphs graphs, const Schedule& schedule, const Limits& limits, uint64_t seed,
               bool report_drafts, AfterRound after_round = nullptr, Trace* trace = nullptr,
               OwnedNgrams ngrams = {});
  ~GraphCarrier();   // waits for what is in flight, but never for long

  // The prompt has been run, its rows from `keep` on just now, and gave `first`.
  void begin(const std::vector<int>& prompt, int keep, int first);
  // Throws DriverError after the last event that there was; tokens() keeps the committed text.
  std::optional<Event> next();
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  const std::vector<int>& tokens() const { return plan_.tokens(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Timed {   // a launch between two events that tell the time
    const char* name;
    int track, rows;
    int64_t pass;   // whose record will say how many rows it had; -1: none
    int device;
    EventHandle begin, end;
  };

  bool queue();                      // whatever the plan allows; true if there was something
  void launch_draft(const Step& step);
  void launch_pass(const Step& step);
  void launch_round(const Step& step);
  bool in_one_stream() const { return one_device_ && !plan_.overlapping(); }
  void wait_for(const Lane& lane, const Step& step);
  void enter(const Lane& lane);
  bool collect();                    // verdicts and drafts that have come; true if there were any
  bool collect_draft();
  void take(const Record& record);
  void count_done();
  bool look_after(Clock::time_point since);   // true while it works
  void drain();
  const Lane& draft_lane() const;
  const Lane& pass_lane(int leg) const;
  void copy(const Lane& lane, const Copy& what, const Step& step);

  void launch(const Lane& lane, GraphExec exec, const char* what, int track, int64_t pass);
  EventHandle timer(const Lane& lane);
  EventHandle origin(int device) const;
  void read_timers(bool all);

  Lanes* const lanes_;
  const Graphs graphs_;
  Plan plan_;
  const bool report_drafts_, one_device_;
  const AfterRound after_round_;
  Trace* const trace_;
  std::deque<Event> events_;
  std::atomic<bool> cancelled_{false};
  bool drained_ = false, lost_ = false;
  std::exception_ptr failure_;
  Context current_ = nullptr;

  int64_t done_ = 0;                 // draft launches that are known to be complete
  std::vector<Stream> draft_streams_, pass_streams_;   // by slot: where a launch's event was recorded; null: it has none
  std::vector<int64_t> drafts_before_;   // by slot of a pass: draft launches that are over when its verdict has come
  int64_t landed_ = 0, read_ = 0;    // records of verdicts and of drafts so far
  std::vector<int64_t> drawing_;     // by slot: the launch that a draft record belongs to
  int64_t drawn_ = 0;                // draft launches with the exit head
  struct Told {
    int64_t launch;
    std::optional<Draft> draft;
    int position;
  };
  std::deque<Told> told_;            // of launches, until they are asked for

  // With a trace.
  std::vector<std::pair<int, EventHandle>> origins_;   // of each device: the answer's begin
  std::deque<Timed> timed_;
};

}  // namespace ppsd::cuda
