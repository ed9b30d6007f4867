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
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ppsd {
namespace {

constexpr int kSpins = 2000;   // of a pause each: some tens of microseconds

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool pin_thread(int core, std::string* problem) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  const int error = pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  if (error != 0) *problem = "a thread could not be pinned to core " + std::to_string(core) + ": " + strerror(error);
  return error == 0;
#else
  (void)core;
  (void)problem;
  return true;   // no such thing here: the system places threads
#endif
}

}  // namespace

void Gate::wait_while(uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value() != old) return;
    relax();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value() == old) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Gate::open() {
  word_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
  if (sleepers_.load(std::memory_order_seq_cst) > 0)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

Team::Team(int size, std::vector<int> cores) : size_(std::max(size, 1)), cores_(std::move(cores)) {
  if (size_ == 1) return;
  running_.store(size_ - 1, std::memory_order_relaxed);
  const uint32_t done = done_.value();
  for (int member = 1; member < size_; ++member) helpers_.emplace_back([this, member] { help(member); });
  done_.wait_while(done);
}

Team::~Team() {
  stop_ = true;
  begin_.open();
  for (std::thread& helper : helpers_) helper.join();
}

void Team::run(const std::function<void(int)>& work) noexcept {
  if (size_ == 1) return work(0);
  work_ = &work;
  running_.store(size_ - 1, std::memory_order_relaxed);
  const uint32_t done = done_.value();
  begin_.open();
  work(0);
  done_.wait_while(done);
}

void Team::help(int member) {
  if (member < int(cores_.size())) {
    std::string problem;
    if (!pin_thread(cores_[member], &problem)) {
      const std::lock_guard<std::mutex> lock(pin_mutex_);
      pin_problem_ = problem;
    }
  }
  uint32_t seen = begin_.value();
  finish_part();
  for (;;) {
    begin_.wait_while(seen);
    seen = begin_.value();
    if (stop_) return;
    (*work_)(member);
    finish_part();
  }
}

void Team::finish_part() {
  if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.open();
}

void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = barrier_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_.open();
  } else {
    barrier_.wait_while(phase);
  }
}

void Team::pin_caller() const {
  if (!cores_.empty()) {
    std::string problem;
    pin_thread(cores_[0], &problem);
  }
}

}  // namespace ppsd
