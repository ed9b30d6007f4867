// A team of pinned threads that work on one pass together: the caller is member 0, the helpers wait for the next pass.
//
// Waits spin briefly, then sleep: with every core busy a spinning thread takes the time that the one it waits for
// needs, and a neighbour may hold a core for milliseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ppsd {

// Waiting for an atomic word to change.
class Gate {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void wait_while(uint32_t old);   // returns once the value differs
  void open();                     // raises the value and wakes whoever sleeps

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};

class Team {
 public:
  // `cores`: which core each member runs on, member 0 included; empty: `size` members, not pinned.
  Team(int size, std::vector<int> cores);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // work(member) on every member at once; returns when all have returned. Work must not throw: it could not be passed
  // on while the other members wait at a barrier.
  void run(const std::function<void(int)>& work) noexcept;

  // Inside run: returns once every member has called it.
  void barrier();

  // Inside run: parts of `count` units that no other member has taken yet; `claim` counts the claims of one phase.
  struct Part {
    int begin, end;
    bool empty() const { return begin >= end; }
  };
  Part take(std::atomic<int>& claim, int count, int grain) const;

  // Pins the calling thread (member 0) to its core, if cores were given.
  void pin_caller() const;

  // One line about a thread that could not be pinned; empty when all is well.
  std::string pin_problem() const { return pin_problem_; }

 private:
  void help(int member);
  void finish_part();

  const int size_;
  const std::vector<int> cores_;
  std::vector<std::thread> helpers_;
  const std::function<void(int)>* work_ = nullptr;
  bool stop_ = false;
  Gate begin_;                        // a new pass
  std::atomic<int> running_{0};       // helpers still in the pass, or starting
  Gate done_;
  std::atomic<int> arrived_{0};       // at the barrier
  Gate barrier_;
  std::mutex pin_mutex_;
  std::string pin_problem_;
};

}  // namespace ppsd
