// A team of pinned threads that work on one pass together: the caller is member 0, the helpers wait for the next pass.
//
// Waits spin briefly, then sleep: with every core busy a spinning thread takes the time that the one it waits for
// needs, and a neighbour may hold a core for milliseconds. Where that goes on, fewer members work.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/thread.h"

namespace ppsd {

void run_on(const std::vector<int>& cores);   // the calling thread, and those that it starts; none: it stays where it is

// Waiting for an atomic word to change.
class Gate {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  double wait_while(uint32_t old);   // returns once the value differs: the seconds for which it slept, mostly none
  void open();                     // raises the value and wakes whoever sleeps

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};

// Which units of one phase of a pass have been taken, by the member whose stretch they lie in.
class Shares {
 public:
  explicit Shares(int members) : members_(members), next_(std::make_unique<Next[]>(size_t(members))) {}

  void reset() {   // by one thread, before the members begin
    for (int member = 0; member < members_; ++member) next_[member].unit.store(0, std::memory_order_relaxed);
  }
  int take(int owner, int units) { return next_[owner].unit.fetch_add(units, std::memory_order_relaxed); }

 private:
  struct alignas(64) Next {
    std::atomic<int> unit{0};
  };
  int members_;
  std::unique_ptr<Next[]> next_;
};

// How many members of a team work. A thread that has lost its core to another program keeps all others waiting, at every
// barrier, for milliseconds: with one busy program beside them two threads decode slower than one.
class WorkerSet {
 public:
  // `pinnable`: the members have cores of their own for as long as all goes well.
  WorkerSet(int size, bool pinnable) : size_(size), highest_(size + (pinnable ? 1 : 0)), level_(highest_) {}

  int active() const { return level_ < size_ ? level_ : size_; }
  bool pinned() const { return level_ > size_; }

  // After a pass that took so many seconds, of which its members together slept so many at barriers. True: active() or
  // pinned() has changed.
  bool after(double seconds, double slept);

 private:
  bool move(int by);

  const int size_, highest_;
  int level_;             // members at work; above size_: all of them, pinned
  double excess_ = 0.0;   // seconds slept beyond what is bearable
  double here_ = 0.0;     // seconds of passes at this level
  double patience_ = 0.0; // seconds after which the next level is tried
  bool tried_ = false;    // this level was, and is not proven yet
};

class Team {
 public:
  // `cores`: which core each member runs on, member 0 included; empty: `size` members, not pinned.
  // `around`: where they may run while others crowd them out of those; empty: on any of `cores`.
  // Throws NoThread.
  Team(int size, std::vector<int> cores, const std::vector<int>& around = {});
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  int active() const { return active_; }   // members that the next pass has, up to size()
  void keep_all() { watching_ = false; }   // they all work from now on, whatever others do

  // How long a pass took, and for how much of it its members together slept at barriers.
  struct Pass {
    double seconds = 0.0, slept = 0.0;
  };
  // From now on a pass of so many members was for the worker set what `told` says, and not what the clock does: a test does
  // not know who else wants its cores.
  void judge_by(std::function<Pass(int active)> told) { told_ = std::move(told); }
  void judge_like(const Team& other) { told_ = other.told_; }

  // work(member) on members 0 to active() - 1 at once; returns when all have returned. Work must not throw: it could not
  // be passed on while the other members wait at a barrier. Throws std::runtime_error after a fork, which leaves the
  // helpers behind.
  void run(const std::function<void(int)>& work);

  // Inside run: returns once every member at work has called it.
  void barrier();

  struct Stretch {
    int begin = 0, end = 0;
  };
  // Of `units` that are shared, those that a member begins with.
  Stretch stretch(int units, int member) const {
    return {int(int64_t(units) * member / active_), int(int64_t(units) * (member + 1) / active_)};
  }

  // Inside run: work(begin, end) on parts of [0, count) until every unit is somebody's; `step` units stay together.
  // Each member begins with its own stretch, the same in every pass (what it reads is then in its own cache, and what it
  // asks for in advance is its own next part), and then helps the others with theirs: one that lost its core for a while
  // leaves little.
  template <class Work>
  void share(Shares& shares, int member, int count, int step, Work&& work) const {
    if (active_ == 1) return work(0, count);
    const int units = (count + step - 1) / step;
    for (int k = 0; k < active_; ++k) {
      const int owner = (member + k) % active_;
      const auto [first, last] = stretch(units, owner);
      const int grain = std::max(1, (last - first + kParts - 1) / kParts);
      for (int at = shares.take(owner, grain); at < last - first; at = shares.take(owner, grain))
        work((first + at) * step, std::min((first + std::min(at + grain, last - first)) * step, count));
    }
  }

  // The calling thread, which will be member 0, goes to its core, if cores were given.
  void pin_caller();

  // One line about a thread that could not be pinned; empty when all is well.
  std::string pin_problem() const { return pin_problem_; }

 private:
  static constexpr int kParts = 4;   // of a member's stretch

  struct alignas(64) Call {
    Gate gate;
  };

  void pass(const std::function<void(int)>& work) noexcept;
  void help(int member, uint32_t seen);
  void stop();
  void finish_part();
  void slept(double seconds);
  void judge(Pass pass);
  void regroup();
  std::vector<int> place(int member) const;

  const int size_;
  const std::vector<int> cores_, around_;
  WorkerSet workers_;
  bool watching_ = true;
  std::function<Pass(int)> told_;     // instead of the clock
  int active_;                        // changes between passes alone
  const uint32_t forks_ = forks();
  std::thread::id caller_;            // that was pinned
  const std::function<void(int)>* work_ = nullptr;
  bool stop_ = false;
  std::unique_ptr<Call[]> calls_;     // each helper's: a new pass, and it is wanted there
  std::atomic<int> running_{0};       // helpers still in the pass, or starting
  Gate done_;
  std::atomic<int> arrived_{0};       // at the barrier
  Gate barrier_;
  std::atomic<int64_t> slept_{0};     // nanoseconds in this pass, by all members at work
  std::mutex pin_mutex_;
  std::string pin_problem_;
  std::vector<Thread> helpers_;
};

// The threads that work on one pass together, each on a core of its own where there are enough. Throws NoThread.
std::unique_ptr<Team> make_shared_team(int threads);

}  // namespace ppsd
