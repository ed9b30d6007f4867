#include "lookup.h"

#include <algorithm>

namespace ppsd {
namespace {

constexpr int kLong = 8;        // tokens of a match that is preferred to a newer, shorter one
constexpr int kMost = 24;       // tokens of a match that are counted
constexpr double kWeight = 4.0;      // verdicts that a prior counts as
constexpr double kDiscount = 0.98;   // what older ones keep at each verdict
constexpr double kHead = 0.5;        // prior of the exit head
constexpr double kCheaper = 0.1;     // by so much a copy may be worse than the head: it costs no draft step
constexpr std::array<int, 9> kMatch = {1, 3, 4, 5, 6, 8, 12, 16, 24};
constexpr std::array<double, 9> kPrior = {0.50, 0.66, 0.74, 0.79, 0.82, 0.88, 0.91, 0.94, 0.99};

// Of the `length` tokens before position `end`.
uint64_t key(const Lookup::TokenAt& at, int end, int length) {
  uint64_t sum = 0;
  for (int i = end - length; i < end; ++i) {
    sum = (sum + uint64_t(at(i)) + 1) * 0x9E3779B97F4A7C15u;
    sum ^= sum >> 29;
  }
  return sum;
}

}  // namespace

Lookup::Lookup() { indices_[0].length = kLong; }

void Lookup::learn(const std::vector<int>& tokens, int shortest) {
  Index& brief = indices_[1];
  if (brief.length != shortest) {
    for (Index& index : indices_) index.next.clear();
    brief.length = shortest;
    indexed_ = 0;
  }
  const TokenAt at = [&](int position) { return tokens[position]; };
  for (; indexed_ < int(tokens.size()); ++indexed_)
    for (Index& index : indices_)
      if (indexed_ >= index.length) index.next[key(at, indexed_, index.length)] = indexed_;
}

std::optional<Draft> Lookup::propose(const TokenAt& at, int known) const {
  for (const Index& index : indices_) {
    if (index.length == 0 || known < index.length) continue;
    const auto found = index.next.find(key(at, known, index.length));
    if (found == index.next.end()) continue;
    const int next = found->second;
    int match = 0;
    while (match < std::min(next, kMost) && at(next - 1 - match) == at(known - 1 - match)) ++match;
    if (match < index.length) continue;   // only the sums are equal
    return Draft{at(next), chance(match), match};
  }
  return std::nullopt;
}

void Lookup::observe(const std::vector<Draft>& judged, int accepted) {
  for (Chance& chance : chances_) chance = {chance.accepted * kDiscount, chance.rejected * kDiscount};
  for (int i = 0; i < int(judged.size()); ++i) {
    if (judged[i].copied >= kFromSuccessors) continue;
    const bool copied = judged[i].copied > 0;
    if (!copied) head_ = {head_.accepted * kDiscount, head_.rejected * kDiscount};
    Chance& chance = copied ? chances_[bucket(judged[i].copied)] : head_;
    (i < accepted ? chance.accepted : chance.rejected) += 1.0;
  }
}

size_t Lookup::bucket(int match) {
  return size_t(std::upper_bound(kMatch.begin(), kMatch.end(), match) - kMatch.begin()) - 1;
}

double Lookup::prior(int match) { return kPrior[bucket(match)]; }

bool Lookup::beats_head(double chance) const { return chance >= mean(kHead, head_) - kCheaper; }

// Of a Beta posterior.
double Lookup::mean(double prior, const Chance& seen) {
  return (kWeight * prior + seen.accepted) / (kWeight + seen.accepted + seen.rejected);
}

}  // namespace ppsd
