// The carrier whose verification stages are elsewhere: rows go out as messages, verdicts come back as such.
//
// One thread drafts and writes messages (work), another one hands in verdicts (land), a third one reads the events
// (next). Unlike the other carriers this one does not know when the first verification stage is free: every row leaves
// as soon as it is drafted, and the stage takes what has arrived by then (station.h).
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "event_queue.h"
#include "replanning.h"
#include "wire.h"

namespace ppsd {

class Remote {
 public:
  // first_epoch: on the wire; above all that earlier answers have used. prompt_rows: of a pass over a prompt. planner:
  // chooses the schedule after every round, or null. trace: record a timeline, here and at every station.
  Remote(DraftStage* draft, int hidden, int prompt_rows, const Schedule& schedule, const Limits& limits, uint64_t seed,
         uint64_t first_epoch, bool report_drafts, bool feedback, std::shared_ptr<Planner> planner = nullptr,
         bool trace = false);

  // Before work(). settings: what every stage is told of this answer, kWireSettings words and more. logprobs: verdicts are to
  // tell log-probabilities. Throws std::runtime_error for more settings than a message holds.
  void begin(const std::vector<int>& prompt, int keep, const std::vector<int32_t>& settings, bool logprobs = false);

  // The drafting thread: works until there is something to send, and writes it to out[.][most_words(hidden)].
  // How many messages; -1: the answer has ended.
  int work(int32_t* out);
  int most_messages() const { return (prompt_rows_ + kMaxRows - 1) / kMaxRows + 1; }

  // The receiving thread. True: an older epoch has become void (announce epoch() and spared()). Throws std::runtime_error
  // for what does not follow the protocol.
  bool land(const int32_t* verdict, size_t words);
  uint64_t epoch() const { return first_epoch_ + scheduler_.epoch(); }
  int spared() const { return scheduler_.spared(); }

  using Status = EventQueue::Status;
  Status next(int milliseconds, Event* event, double* seconds) { return events_.next(milliseconds, event, seconds); }
  void cancel();
  const std::vector<int>& tokens() const { return scheduler_.tokens(); }   // when it has ended
  int rows() const { return scheduler_.rows(); }                   // likewise: of these, those whose rows every rank holds
  struct Counts {
    int64_t steps = 0;                  // of one row and a draft, that were not dropped
    double seconds = 0.0;
  };
  Counts counts() const;
  const Trace* trace() const { return trace_.get(); }   // on the wire_clock(); null: none is recorded

 private:
  using Clock = std::chrono::steady_clock;

  bool over() const { return stop_ || scheduler_.finished(); }
  void report_locked(Event event);
  int send_prompt(int32_t* out);
  int send(const Chunk& chunk, int limit, int32_t flags, int32_t* out) const;

  DraftStage* draft_;
  const int hidden_, prompt_rows_;
  Scheduler scheduler_;
  const uint64_t first_epoch_;
  const bool report_drafts_, feedback_;
  Replanning replanning_;
  const std::unique_ptr<Trace> trace_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  EventQueue events_;   // seconds: since begin()
  std::vector<int> prompt_;
  std::vector<int32_t> settings_;
  int keep_ = 0, sent_ = -1;                 // rows of the prompt that have been sent; -1: not even the beginning
  bool logprobs_ = false;
  bool prompt_sent_ = false, begun_ = false; // the prompt has left; its verdict has come
  Clock::time_point began_, committed_;      // the latter: when the last round was
  Counts counts_;
  std::atomic<bool> stop_{false};
};

}  // namespace ppsd
