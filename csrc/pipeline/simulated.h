// The carrier in simulated time: the scheduler's decisions, with stage costs and link delays as numbers.
//
// Every stage is a worker of its own. Work takes the seconds that the costs say, and is done (by the stages it was
// given, real or toys) at the end of them; all that coincides happens in one instant: draft, verification, verdict,
// then new work. What a verdict makes void is dropped at once, wherever it is: the limit of ever thinner layers.
//
// The prompt passes in no time: time 0 is when its token is committed.
#pragma once

#include <functional>

#include "carrier.h"
#include "costs.h"

namespace ppsd {

class Simulated {
 public:
  // Called after every committed round but the prompt's, with the seconds since the one before; may change the schedule.
  using AfterRound = std::function<void(const Round&, double seconds, Scheduler*)>;

  Simulated(Stages stages, const Schedule& schedule, const Limits& limits, uint64_t seed, StageCosts costs,
            AfterRound after_round = nullptr, Trace* trace = nullptr);

  void remember(OwnedNgrams ngrams) { scheduler_.remember(std::move(ngrams)); }   // before begin
  void begin(const std::vector<int>& prompt, int keep) { prompt_ = prompt, keep_ = keep; }
  std::optional<Round> next();   // the rounds, in order; after the last one nothing
  const std::vector<int>& tokens() const { return scheduler_.tokens(); }
  double seconds() const { return now_; }   // when the round that next() has just given took place

 private:
  struct Work {                     // what is under way, and how much of it is left
    double left = 0.0, begun = 0.0;
  };
  struct Message {
    Chunk chunk;
    double travel = 0.0;            // left to go on the link
  };
  struct Station {                  // a verification stage
    std::deque<Message> inbox;
    std::optional<Chunk> chunk;     // being worked on
    Work work;
  };
  struct Reply {
    Verdict verdict;
    double travel;
  };

  void prefill();
  void finish();
  void start();
  void pass_time();
  void finish_step();
  void finish_chunk(int stage);
  void land();
  void drop_void();
  double first_stage_free_in() const;
  double leave_in() const;
  double travel(int stage, int rows) const;
  double link(int stage) const;
  double pass(int stage, int rows) const;
  double draft_pace() const;
  double verify_pace() const;
  bool verifying() const;
  bool over(double left) const { return left <= tolerance_; }
  void record(const char* name, int track, int rows, double begun);

  Stages stages_;
  Scheduler scheduler_;
  const StageCosts costs_;
  const AfterRound after_round_;
  Trace* const trace_;
  double tolerance_ = 0.0;          // times that differ by less are the same
  std::vector<int> prompt_;
  int keep_ = 0;
  bool started_ = false;
  double now_ = 0.0, before_ = 0.0;   // before: of the round before
  std::optional<DraftStep> step_;
  Work drafting_;
  std::vector<Station> stations_;
  std::deque<Reply> replies_;
  std::deque<Round> rounds_;
};

}  // namespace ppsd
