// Tells an event loop, through a descriptor that it watches, that answers have something to read.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

namespace ppsd {

class News {
 public:
  News() {
    if (pipe(ends_) != 0) throw std::system_error(errno, std::generic_category(), "no pipe for an event loop");
    for (int end : ends_) {
      fcntl(end, F_SETFL, O_NONBLOCK);
      fcntl(end, F_SETFD, FD_CLOEXEC);
    }
  }
  ~News() {
    for (int end : ends_) close(end);
  }
  News(const News&) = delete;
  News& operator=(const News&) = delete;

  int descriptor() const { return ends_[0]; }   // readable once it has rung
  void ring() {                                 // after the event is there
    if (!rung_.exchange(true)) (void)!write(ends_[1], "!", 1);
  }
  void clear() {                                // before events are looked for
    char read_away[8];
    (void)!read(ends_[0], read_away, sizeof read_away);
    rung_.store(false);
  }

 private:
  int ends_[2];
  std::atomic<bool> rung_{false};
};

}  // namespace ppsd
