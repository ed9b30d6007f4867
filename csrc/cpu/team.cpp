#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cores.h"

namespace ppsd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 2000;   // of a pause each: some tens of microseconds

// Lets a thread run on these cores alone.
bool pin_thread(pthread_t thread, const std::vector<int>& cores, std::string* problem) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  const int error = pthread_setaffinity_np(thread, sizeof set, &set);
  if (error != 0)
    *problem = "a thread could not be pinned to core " + std::to_string(cores.front()) + ": " + strerror(error);
  return error == 0;
#else
  (void)thread;
  (void)cores;
  (void)problem;
  return true;   // no such thing here: the system places threads
#endif
}

// Seconds that the members together have slept more than is bearable, until one of them leaves. A burst of another program,
// or of this one (a server that reads sixteen new requests), passes; a neighbour that stays does not.
constexpr double kTolerated = 0.04;
constexpr double kTrial = 0.012;    // the same, while a member is tried
constexpr double kProven = 0.25;    // seconds after which it is not on trial any more
constexpr double kPatience = 0.1;   // seconds until one more member is tried; twice as many each time that this fails ..
constexpr double kMost = 3.0;       // .. up to here

// Of the time of a pass, how much a member may sleep at barriers: what is lost then is what one member fewer costs where
// arithmetic is the limit, and less than that where memory is.
double bearable(int active) { return std::max(0.8 / active, 0.15); }

}  // namespace

void run_on(const std::vector<int>& cores) {
  std::string problem;
  if (!cores.empty()) pin_thread(pthread_self(), cores, &problem);
}

double Gate::wait_while(uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value() != old) return 0.0;
    spin_pause();
  }
  const auto begin = Clock::now();
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value() == old) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return seconds_since(begin);
}

void Gate::open() {
  word_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
  if (sleepers_.load(std::memory_order_seq_cst) > 0)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

Team::Team(int size, std::vector<int> cores, const std::vector<int>& around)
    : size_(std::max(size, 1)),
      cores_(std::move(cores)),
      around_(around.empty() ? cores_ : around),
      workers_(size_, !cores_.empty()),
      active_(size_),
      calls_(std::make_unique<Call[]>(size_t(size_))) {
  if (size_ == 1) return;
  running_.store(size_ - 1, std::memory_order_relaxed);
  const uint32_t done = done_.value();
  helpers_.reserve(size_t(size_ - 1));
  try {
    for (int member = 1; member < size_; ++member)
      helpers_.emplace_back([this, member, seen = calls_[member].gate.value()] { help(member, seen); });
  } catch (...) {
    stop();
    throw;
  }
  done_.wait_while(done);
}

Team::~Team() { stop(); }

void Team::stop() {
  stop_ = true;
  for (int member = 1; member < size_; ++member) calls_[member].gate.open();
  helpers_.clear();
}

void Team::run(const std::function<void(int)>& work) {
  if (size_ > 1 && forks_ != forks())
    throw std::runtime_error("what works here was loaded before a fork: load it in this process");
  pass(work);
}

void Team::pass(const std::function<void(int)>& work) noexcept {
  if (size_ == 1) return work(0);
  const auto begin = Clock::now();
  work_ = &work;
  if (active_ > 1) {
    running_.store(active_ - 1, std::memory_order_relaxed);
    const uint32_t done = done_.value();
    for (int member = 1; member < active_; ++member) calls_[member].gate.open();
    work(0);
    slept(done_.wait_while(done));
  } else {
    work(0);
  }
  if (watching_) judge({seconds_since(begin), 1e-9 * double(slept_.exchange(0, std::memory_order_relaxed))});
}

void Team::judge(Pass pass) {
  if (told_) pass = told_(active_);
  if (workers_.after(pass.seconds, pass.slept)) regroup();
}

void Team::help(int member, uint32_t seen) {
  if (!cores_.empty()) {
    std::string problem;
    if (!pin_thread(pthread_self(), {cores_[member]}, &problem)) {
      const std::lock_guard<std::mutex> lock(pin_mutex_);
      pin_problem_ = problem;
    }
  }
  finish_part();
  Gate& call = calls_[member].gate;
  for (;;) {
    call.wait_while(seen);
    seen = call.value();
    if (stop_) return;
    (*work_)(member);
    finish_part();
  }
}

void Team::finish_part() {
  if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.open();
}

void Team::slept(double seconds) {
  if (seconds > 0.0) slept_.fetch_add(int64_t(seconds * 1e9), std::memory_order_relaxed);
}

void Team::barrier() {
  if (active_ == 1) return;
  const uint32_t phase = barrier_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == active_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_.open();
  } else {
    slept(barrier_.wait_while(phase));
  }
}

void Team::pin_caller() {
  caller_ = std::this_thread::get_id();
  std::string problem;
  if (!cores_.empty()) pin_thread(pthread_self(), place(0), &problem);
}

std::vector<int> Team::place(int member) const {
  return workers_.pinned() || !watching_ ? std::vector<int>{cores_[member]} : around_;
}

// As the worker set has it now: how many work, and where.
void Team::regroup() {
  active_ = workers_.active();
  if (cores_.empty()) return;
  std::string problem;
  if (caller_ == std::this_thread::get_id()) pin_thread(pthread_self(), place(0), &problem);
  for (int member = 1; member < size_; ++member) pin_thread(helpers_[member - 1].handle(), place(member), &problem);
}

// One thread alone has nobody to wait for: it goes where there is room.
std::unique_ptr<Team> make_shared_team(int threads) {
  const std::vector<int> cores = usable_cores().order;
  return std::make_unique<Team>(threads, threads > 1 ? cores_from(cores, 0, threads) : std::vector<int>(), cores);
}

bool WorkerSet::after(double seconds, double slept) {
  if (highest_ == 1) return false;
  here_ += seconds;
  if (active() > 1) {   // while one member is away, all others sleep
    excess_ = std::max(0.0, excess_ + slept / (active() - 1) - bearable(active()) * seconds);
    if (excess_ > (tried_ ? kTrial : kTolerated)) {
      patience_ = tried_ ? std::min(2.0 * patience_, kMost) : kPatience;
      return move(-1);
    }
  }
  if (tried_ && here_ >= kProven) {
    tried_ = false;
    patience_ = kPatience;
  }
  return here_ >= patience_ && excess_ == 0.0 && level_ < highest_ && move(+1);
}

bool WorkerSet::move(int by) {
  level_ += by;
  here_ = excess_ = 0.0;
  tried_ = by > 0;
  return true;
}

}  // namespace ppsd
