// Memory as threads may see it: ranges that a kernel may touch, who wrote what last, and who has to see that.
//
// Global memory is the host's. Beside it, each word that kernels have written has a record: its value before, and the
// writer. A read is ordered after the write if the writer's grid had ended before the reader's began (or was waited for),
// if both are of one CTA with a barrier between, or if a release by the writer's CTA was seen by an acquire of the
// reader's. A read that is not may return the old value.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace virtual_gpu {

constexpr int kStreams = 8;

struct Range {
  uint64_t begin, end;
  uint64_t parameters = 0;   // of a launch that point to its begin: bits
};

inline int stream_of(uint32_t grid) { return int(grid >> 28); }
inline uint32_t number_of(uint32_t grid) { return grid & 0xFFFFFFF; }

// Of each stream the last grid whose writes are seen, with all grids before it.
struct Order {
  uint32_t grids[kStreams] = {};
  void merge(const Order& other) {
    for (int i = 0; i < kStreams; ++i)
      if (other.grids[i] > grids[i]) grids[i] = other.grids[i];
  }
  bool has(uint32_t grid) const { return grids[stream_of(grid)] >= number_of(grid); }
};

// Writes of a CTA before a barrier are seen, and those of one thread after it.
struct Seen {
  uint32_t grid, cta, epoch, thread;
};
void merge(std::vector<Seen>& into, const std::vector<Seen>& from, const Order& known);
void add(std::vector<Seen>& into, const Seen& one);

// The last write of a word.
struct Written {
  uint32_t before = 0;   // its value then
  uint32_t grid = 0, cta = 0;
  uint32_t epoch = 0, thread = 0;
};

class Record {
 public:
  // Null where no kernel has written.
  Written* find(uint64_t word) {
    const uint64_t page = word / kPage;
    if (page != last_) {
      const auto found = pages_.find(page);
      if (found == pages_.end()) return nullptr;
      last_ = page, cells_ = found->second.get();
    }
    Written* cell = cells_ + word % kPage;
    return cell->grid ? cell : nullptr;
  }
  Written& make(uint64_t word) {
    const uint64_t page = word / kPage;
    if (page != last_) {
      auto& cells = pages_[page];
      if (!cells) cells = std::make_unique<Written[]>(kPage);
      last_ = page, cells_ = cells.get();
    }
    return cells_[word % kPage];
  }
  void clear() { pages_.clear(), releases.clear(), last_ = ~uint64_t(0); }

  struct Release {
    Order known;
    std::vector<Seen> seen;
  };
  std::unordered_map<uint64_t, Release> releases;   // by address

 private:
  static constexpr uint64_t kPage = 1024;   // words
  std::unordered_map<uint64_t, std::unique_ptr<Written[]>> pages_;
  uint64_t last_ = ~uint64_t(0);
  Written* cells_ = nullptr;
};

// A CTA's shared memory. Of each byte: who wrote and who read it since the last barrier.
struct Shared {
  struct Use {
    uint32_t epoch = 0;
    uint16_t writer = 0, readers = 0;   // warps: bits
  };
  std::vector<uint8_t> bytes;
  std::vector<Use> uses;

  void begin(int size);   // poisoned
  // What is wrong with an access by a warp, or null. `changes`: a write of other bytes than those that are there.
  const char* note(uint32_t from, int size, int warp, bool writes, bool changes, uint32_t epoch);
};

}  // namespace virtual_gpu
