// An answer in simulated time: the scheduler's decisions, with stage costs and link delays as numbers.
//
// Every stage is a worker of its own. Work takes the seconds that the costs say; all that coincides happens in one instant:
// draft, verification, verdict, then new work. What a verdict makes void is dropped at once, wherever it is: the limit of ever
// thinner layers. The prompt passes in no time: time 0 is when its token is committed.
#pragma once

#include <functional>

#include "carrier.h"
#include "costs.h"

namespace ppsd {

// An answer whose every token is known beforehand.
struct KnownAnswer {
  std::vector<int> text;   // the prompt, and what plain decoding makes of it
  int prompt = 1;          // tokens
  // A draft for `position`; `place` others before it wait for their verdict. right: all that stands before it is of the text.
  std::function<Draft(int position, int place, bool right)> draw;
  Limits limits;
};

// Of a random text: acceptance[i]: of a draft that i others wait in front of; the last one goes for all further ones.
// The same seed gives the same mistakes.
KnownAnswer random_answer(int tokens, const std::vector<double>& acceptance, uint64_t seed);

// Rows that have passed a stage. Throws std::logic_error for a message that a stage could not follow.
class PassedRows {
 public:
  explicit PassedRows(const std::vector<int>* text) : text_(text) {}

  void add(int start, const std::vector<int>& ids);   // what a message says
  int length() const { return length_; }
  bool right() const { return right_ == length_; }   // all of them are of the text
  // The model's own token after a row; -1 where the rows up to it are not of the text.
  int next_after(int row) const { return row < right_ ? text_->at(size_t(row) + 1) : -1; }

 private:
  const std::vector<int>* text_;
  int length_ = 0, right_ = 0;   // rows; and of these, the first so many that are of the text
};

class Simulated {
 public:
  // Called after every committed round but the prompt's, with the seconds since the one before; may change the schedule.
  using AfterRound = std::function<void(const Round&, double seconds, Scheduler*)>;

  Simulated(KnownAnswer answer, const Schedule& schedule, uint64_t seed, StageCosts costs, OwnedNgrams ngrams = {},
            AfterRound after_round = nullptr, Trace* trace = nullptr);

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
    PassedRows rows;
    std::deque<Message> inbox;
    std::optional<Chunk> chunk;     // being worked on
    Work work;
  };
  struct Reply {
    Verdict verdict;
    double travel;
  };

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

  const KnownAnswer answer_;
  Scheduler scheduler_;
  const StageCosts costs_;
  const AfterRound after_round_;
  Trace* const trace_;
  double tolerance_ = 0.0;          // times that differ by less are the same
  double now_ = 0.0, before_ = 0.0;   // before: of the round before
  PassedRows drafted_;
  std::optional<DraftStep> step_;
  Work drafting_;
  std::vector<Station> stations_;
  std::deque<Reply> replies_;
  std::deque<Round> rounds_;
};

}  // namespace ppsd
