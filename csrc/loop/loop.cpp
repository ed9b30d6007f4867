#include "loop.h"

#include <new>
#include <utility>

namespace ppsd {

Loop::Loop(std::unique_ptr<ModelBackend> backend, int blocks, const LoopLimits& limits, int ranks)
    : backend_(std::move(backend)),
      blocks_(backend_->block_bytes(), blocks),
      transport_(backend_.get(), &blocks_, &round_, &counts_, limits.cuts, ranks, condition_),
      admission_(backend_.get(), &blocks_, &transport_, &counts_, limits.most_answers),
      round_(backend_.get(), &admission_, &transport_, &counts_, limits.prompt_rows, limits.prior) {
  round_.policy().know(limits.learned);
}

std::shared_ptr<AnswerEvents> Loop::add(Request request, bool automatic, int grammar) {
  if (request.limits.end > capacity()) throw std::bad_alloc();
  auto answer = std::make_unique<Sequence>(std::move(request), automatic, grammar, transport_.verdict_track(), backend_.get(), &blocks_, condition_);
  const auto out = answer->out;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived_.push_back(std::move(answer));
  }
  condition_->notify();
  return out;
}

int Loop::between_rounds(std::function<int(Blocks&)> work) {
  std::packaged_task<int(Blocks&)> task(std::move(work));
  auto done = task.get_future();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(task));
  }
  condition_->notify();
  return done.get();
}

bool Loop::draft_with(std::shared_ptr<const CpuModel> model) {
  const std::lock_guard<std::mutex> stepping(stepping_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!arrived_.empty() || !admission_.empty()) return false;
  dynamic_cast<CpuPasses&>(*backend_).draft_with(std::move(model));
  return true;
}

size_t Loop::work(int32_t* out, int milliseconds) {
  if (!std::exchange(pinned_, true)) pin_caller();
  try {
    {
      const std::lock_guard<std::mutex> lock(stepping_);
      const bool stepped = step();
      if (const auto pass = ranks()->take()) return write_pass(*pass, out);
      if (stepped) return 0;
    }
    condition_->wait(milliseconds);
  } catch (const std::bad_alloc&) {   // as in LoopThread; what is under way comes back to nobody
    const std::lock_guard<std::mutex> lock(stepping_);
    end_all(std::current_exception());
  }
  return 0;
}

bool Loop::step() {
  take_orders();
  if (transport_.land()) show_counts();
  retire();
  if (transport_.overlap(admission_.overlapping())) retire();
  admission_.admit();
  if (!round_.play()) return false;
  retire();
  admission_.wake_consumers();
  show_counts();
  return true;
}

void Loop::end_all(const std::exception_ptr& failure) {
  take_orders();
  transport_.close();   // its threads write into blocks, until they have ended
  admission_.end_all(failure);
}

void Loop::take_orders() {
  decltype(work_) work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work.swap(work_);
    admission_.arrive(&arrived_);
  }
  for (auto& task : work) task(blocks_);
}

void Loop::retire() {
  admission_.retire([this] {   // whoever hears that it is over finds it counted
    show_counts();
    auto learned = round_.policy().learned();
    auto explained = round_.policy().explain();
    const std::lock_guard<std::mutex> lock(mutex_);
    learned_ = std::move(learned);
    explained_ = std::move(explained);
  });
}

void Loop::show_counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_shown_ = counts_;
}

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
