// Many answers at once: a round gives rows to all that run, and one pass over the weights takes them.
//
// Every answer has a scheduler of its own and knows nothing of the others; what a round shares is the pass. The kernels are
// row-invariant and blocks keep the spans of attention, so an answer's tokens do not depend on its company, on drafts, or
// on whether it was interrupted and computed again. docs/design/many-at-once.md tells of it.
//
// Where the late layers are on other ranks (chain.h), a round sends its pass away and ends; the next one begins with other
// answers, while the first are still under way. What a pass has chosen is committed when it comes back. Where answers are fewer
// than stages, an answer drafts on while its rows are verified, and has several passes under way.
//
// In one process stages take turns, each with all threads. But one answer alone whose schedule overlaps has its late layers on
// threads of their own (stage_threads.h), and its passes go there as they would to other ranks. The blocks are the same, so
// that the loop goes from one to the other whenever nothing is under way.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../core/oracle.h"
#include "../core/trace.h"
#include "answer_events.h"
#include "blocks.h"
#include "../stages/chain.h"
#include "cpu_passes.h"
#include "policy.h"
#include "../stages/stage_threads.h"

namespace ppsd {

// What an answer is to be like.
struct Request {
  std::vector<int> prompt;
  Sampling sampling;
  Limits limits;
  Schedule schedule;
  OwnedNgrams ngrams;             // what is copied from
  bool report_drafts = false;
  bool kept = true;               // its rows may be saved: see Blocks
  Oracle oracle;
  std::shared_ptr<Trace> trace;   // or null
};

struct LoopLimits {
  int most_answers = 48;   // that run at once; below kPassRows, so that prompts join
  int prompt_rows = 16;    // of prompts in a round, at the least; more the more answers run, or if none does
  std::vector<int> keep;   // of every row the hidden states after so many layers, for distillation: AnswerEvents::kept
  // Where the late layers are cut into stages, which overlap where one answer is alone; none: they always take turns.
  std::optional<std::vector<int>> cuts = std::nullopt;
  double prior = 0.5;      // how often the exit head's drafts are right, as far as its file says
  std::vector<double> learned = {};   // by the policy of a loop before this one
};

// How often things happened.
struct LoopCounts {
  int64_t rounds = 0, rows = 0, draft_rows = 0, prompt_rows = 0, shared_rows = 0, preempted = 0, overlapped = 0;   // the last: passes
};

class Loop {
 public:
  // Texts lie in so many blocks. ranks: 0; or the passes are rank 0's of so many, which has the early layers, and nobody but
  // `work` steps it. Throws NoThread, std::bad_alloc.
  Loop(std::unique_ptr<Passes> passes, int blocks, LoopLimits limits = {}, int ranks = 0);
  ~Loop();

  int capacity() const {   // the longest text
    return int(std::min(size_t(blocks_.count()) * kSpan, ranks_ ? kPassTables / 2 : size_t(1) << 30));
  }
  const CpuModel& model() const { return passes_.model(); }
  size_t block_bytes() const { return blocks_.block_bytes(); }
  int taps() const { return passes_.taps(); }   // that verdicts bring home

  // From any thread. automatic: the policy decides on drafts, round by round; of the schedule, `lookup` and `recycle` count.
  // Throws std::bad_alloc where the text may become longer than all blocks.
  // grammar: its number, over ranks, whose last one has been told of it; 0: there is none.
  std::shared_ptr<AnswerEvents> add(Request request, bool automatic = false, int grammar = 0);
  LoopCounts counts();
  // From any thread: what `work` gives, between two rounds, when nobody changes the blocks.
  int between_rounds(std::function<int(Blocks&)> work);
  // Until the last answer that has ended: what the policy has learned, for a later process, and what it believes.
  std::vector<double> learned();
  std::string explain();
  void wait() { condition_->wait(); }   // until there may be something to do
  void notify() { condition_->notify(); }

  // Over ranks, by one thread: steps until a pass is ready to leave, for at most so long, and writes it into
  // out[most_pass_words]. Its words; 0: there is none this time.
  size_t work(int32_t* out, int milliseconds);
  // From any thread: draft with the exit head of this model from now on; false: some answers have not ended. Of texts that others
  // begin like, rows of the head before stay: drafts may be worse for them.
  bool draft_with(std::shared_ptr<const CpuModel> model);
  bool over_ranks() const { return ranks_ != nullptr; }
  Chain& chain() { return *ranks_; }   // whose `land` another thread calls

  // By one thread at a time. A round; false: there is nothing to do until something is added, cancelled or consumed.
  bool step();
  void end_all(const std::exception_ptr& failure);
  void pin_caller() { passes_.team().pin_caller(); }
  // For tests, between answers: see Team.
  void judge_by(const std::function<Team::Pass(int active)>& told) {
    passes_.team().judge_by(told);
    judged_ = told;
    if (threads_) threads_->judge_by(told);
  }

 private:
  struct Answer;
  struct Part;
  struct Flight;
  using Answers = std::list<std::unique_ptr<Answer>>;

  bool stages_idle() const { return chain_ && running_.size() < size_t(chain_->stages()); }   // would some be?
  bool overlapping() const { return chain_ && !ranks_; }   // in one process
  void turn_or_overlap();
  void settle();
  bool choose_answers(std::vector<Answer*>* all);
  void land_all();
  void land(const PassVerdict& verdict);
  Flight take_flight(uint64_t number);
  bool rejected(const Answer& answer);
  void send(const std::vector<Part>& parts);
  void do_work();
  void let_in();
  bool admit(Answer& answer);
  int shared_at_most(const Answer& answer, int rows) const;
  void put_back(Answer& answer);
  Answer* victim(const Answer& other);
  bool make_room(Answer& answer, int rows);
  void plan(const std::vector<Answer*>& writing, int prompt_rows, int reading, int left);
  void set_schedule(Answer& answer, const Schedule& schedule);
  void play(const std::vector<Answer*>& writing, const std::vector<Part>& prompts);
  bool draft(const std::vector<Answer*>& writing);
  void next_step(Answer& answer, std::vector<Answer*>* drawing);
  bool embed_rows(const Part& part, const int* ids, std::vector<Part>* parts);
  bool run_early(const std::vector<Part>& parts);
  bool draw(const std::vector<Part>& parts, std::vector<Passes::Draw>* draws);
  bool gather(const std::vector<Answer*>& writing, const std::vector<Part>& prompts, std::vector<Part>* parts);
  void verify(const std::vector<Part>& parts);
  void conclude(const Part& part, const int* chosen, const float* hidden, const std::exception_ptr& failure,
                std::vector<Logprobs> logprobs);
  void tell_taps(const Part& part, const float* taps);
  std::vector<float> with_taps(const Answer& answer, const float* hidden, int row, int rows) const;
  void hear(Answer& answer, int start);
  void hear_all();
  void read_taps(Answer& answer);
  void commit(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs);
  void prompt_done(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs);
  void keep(Answer& answer, int start);
  void cut(Answer& answer, int end);
  void catch_up(Answer& answer);
  void leave(Answer& answer);
  std::exception_ptr failure_of(const Answer& answer) const;
  void fail(Answer& answer, std::exception_ptr failure);
  void notify_consumers();
  void show_counts();
  void show_learned();
  static void span(const Part& part, const char* name, int track, std::chrono::steady_clock::time_point begun);
  void sweep(Answers* answers);
  void forget(const Answer& answer);

  const std::unique_ptr<Passes> own_;
  Passes& passes_;
  CpuPasses* const cpu_;             // the same, where they are: or null
  Blocks blocks_;
  const LoopLimits limits_;
  std::vector<float> x_, early_x_;   // [kPassRows][hidden]
  int early_rows_ = 0;               // of early_x_, in use
  std::vector<Segment> heard_;       // verified rows that a head with a tap is to hear,
  std::vector<float> heard_x_, heard_taps_;   // and what they are: see Passes::hear
  bool hears_prompts_ = false;       // some of these are of prompts
  double hearing_seconds_ = 0.0;     // of others, since the last draft step, to which they count
  Answers waiting_, running_;        // both in order of arrival
  uint64_t arrivals_ = 0;
  Policy policy_;
  Cancelled cancelled_;              // of the round: where one answer has it to itself, and nobody wants that any more
  std::chrono::steady_clock::time_point told_{};   // when consumers were, last

  const std::shared_ptr<Condition> condition_ = std::make_shared<Condition>();
  const std::unique_ptr<Chain> ranks_;             // over ranks; or null
  const std::vector<int> cores_;                   // that stages may be pinned to
  std::function<Team::Pass(int active)> judged_;   // see judge_by
  std::unique_ptr<StageThreads> threads_;          // from when an answer first overlaps; or null
  Chain* chain_ = nullptr;                         // that passes leave by; null: the late layers take their turn here
  std::mutex stepping_;                            // held by the thread that calls `work`, but where it waits
  bool pinned_ = false;                            // the thread that calls `work`
  std::deque<Flight> flights_;                     // passes that have been sent and have not come back, in order
  int numbers_ = 0;                                // of answers, over ranks: the last one
  std::vector<int> closed_;                        // answers that other stages have heard of, and that are over
  std::mutex mutex_;
  Answers arrived_;
  std::vector<std::packaged_task<int(Blocks&)>> work_;   // see between_rounds
  LoopCounts counts_, shown_;
  std::vector<double> learned_;
  std::string explained_;
};

}  // namespace ppsd
