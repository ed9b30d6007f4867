#include "stage_inbox.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace ppsd {
namespace {

constexpr int kOver = std::numeric_limits<int>::max();   // the epoch of an answer that has no rows any more

}  // namespace

// -- what comes in -----------------------------------------------------------------------------------------------------

void StageInbox::post(PassMessage pass) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int answer : pass.closed) raise_locked(answer, kOver);
  for (const PassPart& part : pass.parts) raise_locked(part.answer, part.epoch);
  end_void_locked();
  inbox_.push_back(std::move(pass));
  changed_.notify_one();
}

void StageInbox::raise(int answer, int epoch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  raise_locked(answer, epoch);
  end_void_locked();
}

void StageInbox::raise_locked(int answer, int epoch) {
  int& newest = newest_[answer];
  newest = std::max(newest, epoch);
}

void StageInbox::end_void_locked() {
  const auto is_void = [this](const PassPart& part) { return is_void_locked(part); };
  if (!at_hand_.empty() && std::all_of(at_hand_.begin(), at_hand_.end(), is_void)) void_.store(true);
}

bool StageInbox::is_void_locked(const PassPart& part) const {
  const auto newest = newest_.find(part.answer);
  return part.rows > 0 && newest != newest_.end() && part.epoch < newest->second;
}

void StageInbox::close() {
  closed_.store(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

// -- the work ----------------------------------------------------------------------------------------------------------

bool StageInbox::take_locked(PassMessage* pass) {
  if (inbox_.empty()) return false;
  *pass = std::move(inbox_.front());
  inbox_.pop_front();
  pass->drop([this](const PassPart& part) { return is_void_locked(part); });
  for (; !inbox_.empty() && joins_locked(*pass, inbox_.front()); inbox_.pop_front()) pass->join(inbox_.front());
  for (int answer : pass->closed) newest_.erase(answer);
  at_hand_.clear();
  for (const PassPart& part : pass->parts)
    if (part.rows > 0) at_hand_.push_back({part.answer, part.epoch, part.start, 1, 0, 0, {}, {}});
  void_.store(false);
  return true;
}

bool StageInbox::joins_locked(const PassMessage& pass, const PassMessage& next) const {
  const bool changes = !next.wiped.empty() || !next.copies.empty() || !next.opened.empty() || !next.closed.empty();
  if (pass.limit == 0 || next.limit == 0 || changes || pass.parts.size() != 1 || next.parts.size() != 1) return false;
  const PassPart &a = pass.parts.front(), &b = next.parts.front();
  return a.answer == b.answer && a.epoch == b.epoch && !is_void_locked(b) && a.rows > 0 && b.rows > 0 && b.known == b.start &&
         b.start == a.start + a.rows && a.rows + b.rows <= pass.limit &&
         a.rows + b.rows <= kMaxRows;
}

size_t StageInbox::work(int32_t* out, int milliseconds) {
  PassMessage pass;
  PassVerdict verdict;
  if (!work(&pass, &verdict, milliseconds)) return 0;
  return last_ ? write_verdict(verdict, out) : write_pass(pass, out);
}

bool StageInbox::work(PassMessage* pass, PassVerdict* verdict, int milliseconds) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ready = [this] { return closed_.load() || !inbox_.empty(); };
    bool came = true;
    if (milliseconds < 0) changed_.wait(lock, ready);
    else came = changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), ready);
    if (!came || closed_.load() || !take_locked(pass)) return false;
    if (!pass->opened.empty()) trace_ = pass->traced ? std::make_shared<Trace>(Clock::time_point()) : nullptr;
  }
  struct Busy {   // also while an exception passes by
    explicit Busy(std::atomic<int64_t>* cell) : since(cell) { since->store(wire_clock()); }
    ~Busy() { since->store(0); }
    std::atomic<int64_t>* since;
  } busy(&busy_since_);
  const Clock::time_point begun = Clock::now();
  const int rows = pass->rows();
  *verdict = {};
  const bool done = run_(pass, [this] { return void_.load(std::memory_order_relaxed) || closed_.load(std::memory_order_relaxed); }, verdict);
  if (rows > 0) count(*pass, rows, done, begun);
  if (!done) pass->drop([](const PassPart&) { return true; }), *verdict = {};
  verdict->number = pass->number;
  verdict->begun = begun, verdict->ended = Clock::now();
  for (size_t p = 0; p < pass->parts.size(); ++p)
    if (pass->parts[p].rows == 0) verdict->dropped.push_back(int32_t(p));
  return true;
}

// -- what others see ---------------------------------------------------------------------------------------------------

void StageInbox::count(const PassMessage& pass, int rows, bool done, Clock::time_point begun) {
  const Clock::time_point ended = Clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  at_hand_.clear();
  if (trace_ && pass.traced) {
    const PassPart& part = pass.parts.front();
    const char* name = !done ? "dropped verify" : part.chooses < part.rows ? "prompt" : "verify";
    trace_->add(name, kVerifyTrack, rows, begun, ended);
  }
  passes_ += done;
}

double StageInbox::busy_seconds() const {
  const int64_t since = busy_since_.load();
  return since > 0 ? double(wire_clock() - since) * 1e-9 : 0.0;
}

std::shared_ptr<const Trace> StageInbox::trace() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return trace_;
}

}  // namespace ppsd
