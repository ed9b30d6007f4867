// The KV cache of one text that has it for itself: blocks of kSpan positions, as many as the text needs so far.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace ppsd {

class OwnBlocks {
 public:
  explicit OwnBlocks(size_t block_bytes) : bytes_(block_bytes) {}

  // Room for min(rows, most) rows; what is here stays where it is. It grows by doubling: an answer that may become long and
  // does not costs neither memory nor the time to clear it. Throws std::bad_alloc.
  void hold(int rows, int most) {
    const size_t wanted = size_t(std::min(rows, most) + kSpan - 1) / kSpan, all = size_t(most + kSpan - 1) / kSpan;
    if (wanted <= pointers_.size() || bytes_ == 0) return;
    const size_t count = std::max(wanted, std::min(all, std::max(2 * pointers_.size(), kFirst))) - pointers_.size();
    memory_.emplace_back(bytes_ * count);
    for (size_t i = 0; i < count; ++i) pointers_.push_back(memory_.back().as<>() + bytes_ * i);
  }
  void fill() {   // with made-up numbers: to measure what is read from memory that is really there
    for (const Memory& part : memory_) std::memset(part.as<>(), 0x3C, part.bytes());   // 0.0115 in any format
  }

  size_t bytes() const { return bytes_; }   // of a block
  uint8_t* const* pointers() const { return pointers_.data(); }
  int size() const { return int(pointers_.size()); }

 private:
  static constexpr size_t kFirst = 16;   // blocks

  const size_t bytes_;
  std::vector<Memory> memory_;
  std::vector<uint8_t*> pointers_;
};

}  // namespace ppsd
