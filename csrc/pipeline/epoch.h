// Which work is still wanted. Every rejection raises the epoch, and work of an older one is void. But for one piece: where
// the rejected draft's sibling is the right token and is under way, the rows that it rides with go on.
#pragma once

#include <atomic>
#include <cstdint>

namespace ppsd {

// One writer at a time; any thread may ask.
class Epoch {
 public:
  uint64_t now() const { return now_.load(std::memory_order_acquire); }
  int spared() const { return spared_.load(std::memory_order_acquire); }

  // spared: the first row of what goes on although it is of the epoch just before; -1: nothing does.
  void raise(uint64_t to, int spared = -1) {
    if (to <= now_.load(std::memory_order_relaxed)) return;
    spared_.store(spared, std::memory_order_release);   // first: who sees the new epoch sees it too
    now_.store(to, std::memory_order_release);
  }
  void spare_nothing() { spared_.store(-1, std::memory_order_release); }

  // Of rows from `start` on.
  bool is_void(uint64_t epoch, int start) const {
    const uint64_t present = now();
    return epoch < present && !(epoch + 1 == present && start == spared());
  }

 private:
  std::atomic<uint64_t> now_{0};
  std::atomic<int> spared_{-1};
};

}  // namespace ppsd
