#include "session.h"

#include <algorithm>

namespace ppsd {
namespace {

// The consumer is woken no more often: where it shares the cores with the work, each time costs the work 50 us, or 280
// where the weights have pushed all of Python out of the caches meanwhile. No reader sees the difference.
constexpr std::chrono::milliseconds kNews{25};

}  // namespace

Session::Session(CpuEngine* engine, Request request, Trace* trace)
    : engine_(engine),
      request_(std::move(request)),
      trace_(trace),
      events_(kNews),
      text_(request_.prompt),
      thread_([this] { work(); }) {}

Session::~Session() { end(); }

void Session::end() {
  cancel();
  const std::lock_guard<std::mutex> lock(ending_);
  thread_.join();
}

std::pair<int, int> Session::prompt_rows() const {
  const int rows = int(request_.prompt.size()), kept = kept_;
  if (kept < 0) return {0, rows};
  return {std::min(engine_->rows_done(), rows) - kept, rows - kept};
}

void Session::cancel() {
  cancelled_.store(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (carrier_ != nullptr) carrier_->cancel();
  events_.let_go();
}

std::vector<int> Session::text() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return text_;
}

double Session::seconds() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return seconds_;
}

void Session::work() {
  std::vector<int> tokens = request_.prompt;
  std::exception_ptr failure;
  try {
    if (request_.planner) request_.planner->begin(int(tokens.size()));
    const auto schedule = [this] { return request_.planner ? request_.planner->schedule() : request_.schedule; };
    bool first = true;
    while (play(schedule(), &tokens, first)) first = false;
    tokens.resize(size_t(held_) + 1);   // an answer that shares more has to run those rows again
  } catch (...) {
    failure = std::current_exception();
    tokens.clear();   // nobody knows what the stages' rows are now
  }
  engine_->remember(std::move(tokens));
  events_.finish(failure);
}

// What the planner makes of a round: another schedule for this carrier, or the end of it (false).
bool Session::replan(const Round& round, Scheduler* scheduler) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - committed_).count();
  committed_ = now;
  if (round.prompt || scheduler->finished()) return true;
  const bool overlap = scheduler->schedule().overlap;
  const Schedule& next = request_.planner->after(round, seconds);
  switching_ = next.overlap != overlap;
  if (!switching_) scheduler->set_schedule(next);
  return !switching_;
}

// Decode with one carrier until it ends; its committed text goes into `tokens`. True: another one is to go on.
bool Session::play(const Schedule& schedule, std::vector<int>* tokens, bool first) {
  switching_ = false;
  AfterRound after_round;
  if (request_.planner) after_round = [this](const Round& round, Scheduler* s) { return replan(round, s); };
  const int keep = first ? engine_->shared_rows(*tokens, request_.limits.own) : held_;
  const Stages stages = engine_->begin(request_, keep);
  if (first) kept_ = keep;
  std::unique_ptr<Carrier> carrier;
  if (schedule.overlap && !request_.lock_step) {
    engine_->use_own_teams();
    auto threads = std::make_unique<Threads>(stages, schedule, request_.limits, request_.sampling.seed,
                                             request_.report_drafts, [this](int stage) { engine_->pin_stage(stage); },
                                             std::move(after_round), trace_);
    threads->recycle(request_.successors);
    threads->begin(*tokens, keep);
    carrier = std::move(threads);
  } else {
    engine_->use_shared_team();
    engine_->pin_shared();
    auto lock_step = std::make_unique<LockStep>(stages, schedule, request_.limits, request_.sampling.seed,
                                                request_.ticks, request_.report_drafts, std::move(after_round), trace_);
    lock_step->recycle(request_.successors);
    lock_step->begin(*tokens, keep);
    carrier = std::move(lock_step);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    carrier_ = carrier.get();
    if (cancelled_.load()) carrier->cancel();
  }
  const auto release = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    carrier_ = nullptr;
  };
  try {
    while (auto event = carrier->next()) {
      // What another carrier begins with is a round like any other.
      if (Round* round = std::get_if<Round>(&*event)) round->prompt = round->prompt && first;
      const Clock::time_point done = Clock::now();
      events_.wait_for_room();
      const std::lock_guard<std::mutex> lock(mutex_);
      seconds_ = std::chrono::duration<double>(done - begun_ - waited_).count();
      if (const Round* round = std::get_if<Round>(&*event))
        text_.insert(text_.end(), round->committed.begin(), round->committed.end());
      events_.put(std::move(*event), seconds_);
      waited_ += Clock::now() - done;
    }
  } catch (...) {
    release();
    throw;
  }
  release();
  const bool begun = !carrier->tokens().empty();
  if (begun) *tokens = carrier->tokens();
  held_ = begun ? carrier->rows() : int(tokens->size()) - 1;
  return switching_ && !cancelled_.load();
}

}  // namespace ppsd
