// What has been made of an answer, on its way from the thread that works to whoever asked for it.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>

#include "protocol.h"

namespace ppsd {

// Tells an event loop, through a descriptor that it watches, that answers have something to read.
class Notifier {
 public:
  Notifier() {
    if (pipe(ends_) != 0) throw std::system_error(errno, std::generic_category(), "no pipe for an event loop");
    for (int end : ends_) {
      fcntl(end, F_SETFL, O_NONBLOCK);
      fcntl(end, F_SETFD, FD_CLOEXEC);
    }
  }
  ~Notifier() {
    for (int end : ends_) close(end);
  }
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;

  int descriptor() const { return ends_[0]; }   // readable once it has been notified
  void notify() {                               // after the event is there
    if (!notified_.exchange(true)) (void)!write(ends_[1], "!", 1);
  }
  void clear() {                                // before events are looked for
    char read_away[8];
    (void)!read(ends_[0], read_away, sizeof read_away);
    notified_.store(false);
  }

 private:
  int ends_[2];
  std::atomic<bool> notified_{false};
};

class EventQueue {
 public:
  static constexpr int kAhead = 64;   // events that may wait for the consumer before the work waits for it

  // quiet: after the first event the consumer is woken by `tell` alone, but for half of kAhead. room: called by the consumer's
  // thread when the queue is not full any more.
  explicit EventQueue(bool quiet = false, std::function<void()> room = {}) : quiet_(quiet), room_(std::move(room)) {}

  // -- the consumer --
  enum class Status { kEvent, kEnded, kWaiting };
  // The next event, waiting for at most `milliseconds`. Throws, after the last one, what went wrong.
  // seconds: of work, from the beginning to this event.
  Status next(int milliseconds, Event* event, double* seconds);
  bool ready(int milliseconds);   // is there something for `next`?
  void tell_by(std::shared_ptr<Notifier> notifier);   // notified from now on whenever the consumer is woken
  void wait_for_end();
  void let_go();                  // of a producer that waits for room, for good

  // -- the producer --
  void put(Event event, double seconds);
  void tell();                    // wakes the consumer, if there is something
  bool full() const { return waiting_.load(std::memory_order_relaxed) >= kAhead; }
  void wait_for_room();
  void finish(std::exception_ptr failure = nullptr);   // no event follows; the first call counts

 private:
  struct Stamped {
    Event event;
    double seconds;
  };
  bool wait(std::unique_lock<std::mutex>* lock, int milliseconds);
  void wake();

  const bool quiet_;
  const std::function<void()> room_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Stamped> events_;
  std::shared_ptr<Notifier> notifier_;   // or null
  std::atomic<int> waiting_{0};   // events
  bool told_ = false, over_ = false, let_go_ = false;
  std::exception_ptr failure_;
};

}  // namespace ppsd
