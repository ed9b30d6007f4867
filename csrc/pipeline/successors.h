// What usually follows a token, and two tokens: counted over all texts that a model has said and read, bounded in memory.
// Where nothing in the text at hand can be copied, this still can. Twin of ppsd_rt/reference/successors.py, which says
// where the idea is from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "protocol.h"

namespace ppsd {

// Draft::copied of what is drafted from here: this, and then the bucket of its chance. (No match in a text is as long.)
constexpr int kFromSuccessors = 32;

class Successors {
 public:
  using TokenAt = std::function<int(int)>;   // of a position, drafts included

  Successors();

  // From any thread, as all of these. `tokens` from position `first` on are new.
  void learn(const std::vector<int>& tokens, int first);
  // Counted beforehand: each is {one or two tokens before, the oldest first, -1 for none; what follows; how often}.
  void know(const std::vector<std::array<int, 4>>& counted);
  // What most likely follows the tokens before position `known`, if anything is known.
  std::optional<Draft> propose(const TokenAt& at, int known) const;
  // After a verdict: the first `accepted` of the judged were right.
  void observe(const std::vector<Draft>& judged, int accepted);

 private:
  static constexpr int kOrders = 2;    // tokens that are looked back at: two, or one
  static constexpr int kCounts = 8;    // how often a successor was right, as far as it is counted
  struct Entry {
    uint32_t tag = 0;
    int32_t next = -1;                 // -1: empty
    int32_t count = 0;
  };
  struct Chance {
    double accepted, judged;
  };

  Entry& entry(int order, uint64_t key) { return tables_[order][key >> (64 - kBits)]; }
  const Entry& entry(int order, uint64_t key) const { return tables_[order][key >> (64 - kBits)]; }
  void count(int order, uint64_t key, int next);

  static constexpr int kBits = 17;     // 2^17 entries of 12 bytes for each order
  mutable std::mutex mutex_;
  std::array<std::vector<Entry>, kOrders> tables_;   // after two tokens, after one
  std::array<Chance, kOrders * kCounts> chances_;    // by order and count
};

}  // namespace ppsd
