#include "thread.h"

namespace ppsd {

LoopThread::LoopThread(std::unique_ptr<Loop> loop) : loop_(std::move(loop)), thread_([this] { work(); }) {}

LoopThread::~LoopThread() { end(); }

void LoopThread::end() {
  stop_.store(true);
  loop_->notify();
  thread_.join();
  loop_->end_all(nullptr);   // with the threads of its stages
}

void LoopThread::work() {
  loop_->pin_caller();
  while (!stop_.load()) {
    bool worked = false;
    try {
      worked = loop_->step();
    } catch (...) {   // of memory that is not there: no answer's own
      loop_->end_all(std::current_exception());
    }
    if (!worked && !stop_.load()) loop_->wait();
  }
}

}  // namespace ppsd
