// Threads that end with what holds them, also where the system starts no more of them, and after a fork.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

namespace ppsd {

inline std::atomic<uint32_t> fork_count{0};   // of this process since the library was loaded, its parents' included

// Threads exist only in the process that started them. After a fork the new process has neither them nor the locks that
// they held, and what they were changing may be half done: it uses nothing of another value of this.
inline uint32_t forks() { return fork_count.load(std::memory_order_relaxed); }

// Deletes what this process has made; what it got from its parent by a fork it leaves alone.
struct NotAfterFork {
  uint32_t made = forks();
  template <class T>
  void operator()(T* object) const {
    if (made == forks()) delete object;
  }
};

// The system starts no more threads: one line that says why, and what to do.
class NoThread : public std::runtime_error {
 public:
  explicit NoThread(const std::string& reason);
};

class Thread {
 public:
  explicit Thread(std::function<void()> work);   // throws NoThread
  Thread(Thread&&) = default;
  Thread& operator=(Thread&&) = delete;
  ~Thread() { join(); }

  void join();   // again: nothing; after a fork: nothing, the thread is not here
  std::thread::native_handle_type handle() { return thread_->native_handle(); }

 private:
  std::unique_ptr<std::thread, NotAfterFork> thread_;
};

// The calling thread waits as long as it says: the system may otherwise wake it 50 us late.
void precise_waits();

inline double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// What a thread does between two looks at what it waits for: nothing, for some tens of cycles.
inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" : : : "memory");   // "yield" takes no time on most of these processors
#endif
}

// For tests: how many `Thread`s of this process have not been joined; and that so many more start, and then none (below
// 0: as many as are wanted).
int running_threads();
void let_threads_start(int count);

}  // namespace ppsd
