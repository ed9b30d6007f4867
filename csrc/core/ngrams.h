// Copied drafts: what followed the last 1 to 16 tokens wherever an engine has read or said them before, in the text at hand
// or in other ones. Bounded in bytes: what is longest out of use goes first.
//
// Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023) copies from the text at hand, Token Recycling
// (arXiv 2408.08696) and SuffixDecoding (arXiv 2411.04975) from earlier answers too. This is one index of both: hashed n-grams,
// each with the token that followed and how often it has. The longest match counts; its length, its count and whether it is from
// the text at hand give the chance that the copy is right, which verdicts correct. The priors were measured on 900 greedy answers
// of the default model (docs/history/decoding.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "protocol.h"

namespace ppsd {

class Ngrams {
 public:
  using TokenAt = std::function<int(int)>;   // of a position, drafts included

  static constexpr size_t kBytes = size_t(32) << 20;   // of what all answers share
  static constexpr std::array<int, 8> kOrders = {1, 2, 3, 4, 6, 8, 12, 16};   // tokens that are looked back at
  static constexpr int kCounts = 4;   // how often the same token has followed, as far as it is told apart
  static constexpr int kKinds = 2 * int(kOrders.size()) * kCounts;   // of matches: in other texts, and then in the text at hand

  // clock: tokens that are told apart by their age; the age of all is halved when so many have been counted.
  explicit Ngrams(size_t bytes = kBytes, uint32_t clock = uint32_t(1) << 31);

  // Texts of different owners never see each other's tokens.
  struct Text {
    uint64_t owner = 0;    // as keys have it: mixed
    uint16_t number = 0;   // 0: not begun
  };
  // From any thread, as all of these.
  Text begin(uint64_t owner = 0);
  // `tokens` from position `first` on are new in this text; those before `seen` had been counted in another one.
  void learn(const std::vector<int>& tokens, int first, int seen, const Text& text);
  // Counted beforehand, for every owner: each is {one or two tokens before, the oldest first, -1 for none; what follows; how
  // often}. Before any text is begun.
  void know(const std::vector<std::array<int, 4>>& counted);
  // Another index knows what this one does.
  void know_as(const Ngrams& other) { known_ = other.known_; }
  // What follows the tokens before position `known`, after the longest match that is wanted: of `shortest` tokens in the
  // text itself (0: none), of any length in `others`. Draft::copied is 1 and its kind.
  std::optional<Draft> propose(const TokenAt& at, int known, const Text& text, int shortest, bool others) const;
  // A proposal of this kind was right, or wrong.
  void observe(int copied, bool right);
  static bool from_own_text(int copied) { return copied > kKinds / 2; }

 private:
  struct Entry {
    uint32_t tag;
    uint32_t used;    // tokens that had been counted then, in all; 0: empty
    int32_t next;
    uint16_t text;
    uint16_t count;   // how often `next` has followed after the first time
  };
  static constexpr int kWays = 4;   // entries of a set, which lie in one line of the cache
  struct Set {
    std::array<Entry, kWays> entries;
  };
  struct Chance {
    double right, all;
  };
  using Keys = std::array<uint64_t, kOrders.size()>;

  template <class At>
  int keys(const At& at, int end, uint64_t owner, Keys* keys, int longest = kOrders.back()) const;
  const Entry* find(uint64_t key) const;
  Entry* claim(uint64_t key);
  void count();

  int shift_ = 63;
  mutable std::mutex mutex_;
  std::unique_ptr<void, void (*)(void*)> memory_;   // pages that nothing was written to take no room
  Set* sets_;
  std::array<Chance, size_t(kKinds)> chances_;
  const uint32_t clock_;
  uint32_t counted_ = 0;
  uint16_t texts_ = 0;
  std::shared_ptr<const Ngrams> known_;   // never changed, so it needs no lock
};

// Those of one owner's texts. Without an owner, or an index: of the text at hand alone.
struct OwnedNgrams {
  std::shared_ptr<Ngrams> all;
  std::optional<uint64_t> owner = 0;
};

}  // namespace ppsd
