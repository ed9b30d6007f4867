// Many answers at once: a round gives rows to all that run, and one pass over the weights takes them.
//
// Every answer has a scheduler of its own and knows nothing of the others; what a round shares is the pass. The kernels are
// row-invariant and blocks keep the spans of attention, so an answer's tokens do not depend on its company, on drafts, or
// on whether it was interrupted and computed again. docs/design/many-at-once.md tells of it.
// The loop is what other threads see: it puts together who runs (admission.h), a round (round.h) and the way to the late layers
// (transport.h).
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "round.h"

namespace ppsd {

struct LoopLimits {
  int most_answers = 48;   // that run at once; below kPassRows, so that prompts join
  int prompt_rows = 16;    // of prompts in a round, at the least; more the more answers run, or if none does
  // Where the late layers are cut into stages, which overlap where one answer is alone; none: they always take turns.
  std::optional<std::vector<int>> cuts = std::nullopt;
  double prior = 0.5;      // how often the exit head's drafts are right, as far as its file says
  std::vector<double> learned = {};   // by the policy of a loop before this one
};

class Loop {
 public:
  // Texts lie in so many blocks. ranks: 0; or the passes are rank 0's of so many, which has the early layers, and nobody but
  // `work` steps it. Throws NoThread, std::bad_alloc.
  Loop(std::unique_ptr<ModelBackend> backend, int blocks, const LoopLimits& limits = {}, int ranks = 0);
  ~Loop() { end_all(nullptr); }

  int capacity() const {   // the longest text
    return int(std::min({size_t(blocks_.count()) * kSpan, transport_.most_words() / 2, size_t(1) << 30}));
  }
  const CpuModel& model() const { return backend_->model(); }
  size_t block_bytes() const { return blocks_.block_bytes(); }
  int taps() const { return backend_->taps(); }   // that verdicts bring home

  // From any thread. automatic: the policy decides on drafts, round by round; of the schedule, `lookup` and `recycle` count.
  // Throws std::bad_alloc where the text may become longer than all blocks.
  // grammar: its number, over ranks, whose last one has been told of it; 0: there is none.
  std::shared_ptr<AnswerEvents> add(Request request, bool automatic = false, int grammar = 0);
  LoopCounts counts() { return shown(counts_shown_); }
  // From any thread: what `work` gives, between two rounds, when nobody changes the blocks.
  int between_rounds(std::function<int(Blocks&)> work);
  // Until the last answer that has ended: what the policy has learned, for a later process, and what it believes.
  std::vector<double> learned() { return shown(learned_); }
  std::string explain() { return shown(explained_); }
  void wait() { condition_->wait(); }   // until there may be something to do
  void notify() { condition_->notify(); }

  // Over ranks, by one thread: steps until a pass is ready to leave, for at most so long, and writes it into
  // out[most_pass_words]. Its words; 0: there is none this time.
  size_t work(int32_t* out, int milliseconds);
  // From any thread: draft with the exit head of this model from now on; false: some answers have not ended. Of texts that others
  // begin like, rows of the head before stay: drafts may be worse for them.
  bool draft_with(std::shared_ptr<const CpuModel> model);
  Chain* ranks() { return transport_.ranks(); }   // whose `land` another thread calls; null: all layers are here

  // By one thread at a time. A round; false: there is nothing to do until something is added, cancelled or consumed.
  bool step();
  void end_all(const std::exception_ptr& failure);
  void pin_caller() { backend_->team().pin_caller(); }
  // For tests, before an answer overlaps: see Team.
  void judge_by(const std::function<Team::Pass(int active)>& told) { backend_->team().judge_by(told); }

 private:
  template <class Value>
  Value shown(const Value& value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return value;
  }
  void take_orders();
  void retire();
  void show_counts();

  const std::unique_ptr<ModelBackend> backend_;
  const std::shared_ptr<Condition> condition_ = std::make_shared<Condition>();
  Blocks blocks_;
  LoopCounts counts_;
  Transport transport_;
  Admission admission_;
  RoundRunner round_;
  std::mutex stepping_;   // held by the thread that calls `work`, but where it waits
  bool pinned_ = false;   // that thread

  std::mutex mutex_;
  Sequences arrived_;
  std::vector<std::packaged_task<int(Blocks&)>> work_;   // see between_rounds
  LoopCounts counts_shown_;
  std::vector<double> learned_;
  std::string explained_;
};

// The loop in a thread of its own.
class LoopThread {
 public:
  explicit LoopThread(std::unique_ptr<Loop> loop) : loop_(std::move(loop)), thread_([this] { work(); }) {}   // throws NoThread
  ~LoopThread() { end(); }

  Loop& loop() { return *loop_; }
  void end();   // nothing works on any answer from now on

 private:
  void work();

  const std::unique_ptr<Loop> loop_;
  std::atomic<bool> stop_{false};
  Thread thread_;
};

}  // namespace ppsd
