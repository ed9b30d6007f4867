#include "thread.h"

#include <pthread.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <system_error>

namespace ppsd {
namespace {

std::atomic<int> running{0}, may_start{-1};

[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, [] {
  ++fork_count;
  running = 0;
});

void count_start() {
  const int left = may_start.load();
  if (left == 0) throw std::system_error(EAGAIN, std::generic_category());
  if (left > 0) --may_start;
}

}  // namespace

NoThread::NoThread(const std::string& reason)
    : std::runtime_error("the system starts no more threads (" + reason +
                         "): lower --threads, or raise its limits (ulimit -u, ulimit -v)") {}

Thread::Thread(std::function<void()> work) {
  try {
    count_start();
    thread_.reset(new std::thread(std::move(work)));
    ++running;
  } catch (const std::system_error& error) {
    throw NoThread(error.code().message());
  }
}

void Thread::join() {
  if (thread_ && thread_.get_deleter().made == forks()) {
    thread_->join();
    --running;
  }
  thread_.reset();
}

void precise_waits() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
#endif
}

int running_threads() { return running; }

void let_threads_start(int count) { may_start = count; }

}  // namespace ppsd
