// Copied drafts: where the text repeats itself, what followed the last time is drafted again, without asking the exit
// head. Twin of ppsd_rt/reference/lookup.py, which says where the idea and the figures are from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "successors.h"

namespace ppsd {

class Lookup {
 public:
  using TokenAt = std::function<int(int)>;   // of a position, drafts included

  Lookup();

  // The committed text has grown to `tokens`; `shortest`: tokens that must match, at least 1.
  void learn(const std::vector<int>& tokens, int shortest);
  // The token that followed the last occurrence of what stands before position `known`, if there is one.
  std::optional<Draft> propose(const TokenAt& at, int known) const;
  // Is a copy with this chance about as good as what the exit head has been drawing?
  bool beats_head(double chance) const;
  // After a verdict: the first `accepted` of the judged were right.
  void observe(const std::vector<Draft>& judged, int accepted);

 private:
  // Where the text went on after its last n tokens, for the newest occurrence of each.
  struct Index {
    int length = 0;
    std::unordered_map<uint64_t, int> next;
  };
  struct Chance {
    double accepted = 0.0, rejected = 0.0;
  };
  static size_t bucket(int match);
  static double mean(double prior, const Chance& seen);
  double chance(int match) const { return mean(prior(match), chances_[bucket(match)]); }
  static double prior(int match);

  std::array<Index, 2> indices_;   // a long match first, then a short one
  int indexed_ = 0;
  std::array<Chance, 9> chances_{};   // by the length of the match
  Chance head_;                       // of the exit head
};

}  // namespace ppsd
