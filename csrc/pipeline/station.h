// A verification stage of its own process: an inbox that a network fills, and messages for the next stage.
//
// Drafted rows come one by one, as they are drafted. Whenever the stage is free it takes all that have arrived, up to the
// schedule's chunk: the decision is made where it is known that the stage is free, so no message has to say so.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "epoch.h"
#include "stages.h"
#include "trace.h"
#include "wire.h"

namespace ppsd {

struct StationCounts {
  int64_t passes = 0, rows = 0, dropped_passes = 0;
  double seconds = 0.0;   // of passes that were not dropped
};

class Station {
 public:
  using Clock = std::chrono::steady_clock;
  // Makes the stage ready for an answer: rows to keep, rows there may be, settings: kWireSettings words and more.
  using Begin = std::function<void(int keep, int end, const std::vector<int32_t>& settings)>;

  // last: it has the LM head and gives verdicts. prompt_rows: the most rows of a pass over a prompt.
  // delay: seconds that every message is taken to have been longer on its way.
  Station(VerifyStage* stage, int hidden, bool last, int prompt_rows, Begin begin, double delay);

  // From the threads that receive. Throws std::runtime_error for what does not follow the protocol.
  void post(const int32_t* message, size_t words);
  // What is older is void, and what is under way ends at the next layer; spared: see Epoch.
  void announce(uint64_t epoch, int64_t sent, int spared = -1);

  // From the thread that computes: waits for work, at most so long, and does one piece of it. Returns how many messages
  // for the next stage (or the verdict, from the last one) it has written into out[.][most_words(hidden)]. 0: none this
  // time; -1: closed.
  int work(int32_t* out, int milliseconds);
  int most_messages() const { return (prompt_rows_ + kMaxRows - 1) / kMaxRows + 1; }
  void close();

  double busy_seconds() const;                   // since when the piece of work at hand goes on; 0: there is none
  StationCounts counts() const;
  std::shared_ptr<const Trace> trace() const;    // of the present answer, on the wire_clock(); null: it asks for none

 private:
  struct Message {
    WireHeader header;
    Clock::time_point due;
    std::vector<int32_t> ids;                    // or settings
    std::vector<float> hidden;
  };

  bool take_locked(std::vector<Message>* taken, Clock::time_point* wake);
  void drop_void_locked();
  int begin(const Message& message, int32_t* out);
  int pass(std::vector<Message> taken, int32_t* out);
  int forward(const Chunk& chunk, int32_t flags, int32_t* out) const;
  void recycle_locked(Message message);

  VerifyStage* stage_;
  const int hidden_;
  const bool last_;
  const int prompt_rows_;
  const Begin begin_;
  const Clock::duration delay_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> inbox_;
  std::vector<Message> pool_;                    // buffers to be used again
  Epoch epoch_;
  std::atomic<bool> closed_{false};
  std::atomic<int64_t> busy_since_{0};
  int held_ = 0;                                 // rows that have passed
  int end_ = 0;                                  // rows that the present answer may have; none has begun: 0
  int32_t asked_ = 0;                            // kWireFeedback and kWireLogprob, where the answer asks for it
  StationCounts counts_;
  std::shared_ptr<Trace> trace_;                 // set by the thread that computes
};

// Now, as `sent` says it; comparable between processes of one host.
int64_t wire_clock();
void sleep_until(int64_t clock);

// At most kMaxRows rows of a chunk, from the done-th on, as a message that leaves now. With siblings it has no more than that.
void write_rows(const Chunk& chunk, int done, int hidden, int limit, int32_t flags, int32_t* message);

}  // namespace ppsd
