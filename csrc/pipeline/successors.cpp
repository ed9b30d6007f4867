#include "successors.h"

#include <algorithm>

namespace ppsd {
namespace {

constexpr double kWeight = 4.0;      // verdicts that a prior counts as
constexpr double kDiscount = 0.98;   // what older ones of the same bucket keep at each
constexpr int kOldest[] = {2, 1};    // tokens before the one that follows, by order
// Measured on greedy answers of a model of 1.5 billion weights (docs/history/decoding.md).
constexpr double kPrior[] = {0.18, 0.25, 0.35, 0.50, 0.60, 0.65, 0.75, 0.85,    // after two tokens
                             0.14, 0.19, 0.30, 0.38, 0.45, 0.50, 0.55, 0.60};   // after one

uint64_t mix(uint64_t sum, int token) {
  sum = (sum + uint64_t(token) + 1) * 0x9E3779B97F4A7C15u;
  return sum ^ (sum >> 29);
}

// Of the `length` tokens before position `end`.
template <class At>
uint64_t key(const At& at, int end, int length) {
  uint64_t sum = 0;
  for (int i = end - length; i < end; ++i) sum = mix(sum, at(i));
  return sum;
}

}  // namespace

Successors::Successors() {
  for (auto& table : tables_) table.resize(size_t(1) << kBits);
  for (size_t i = 0; i < chances_.size(); ++i) chances_[i] = {kWeight * kPrior[i], kWeight};
}

void Successors::learn(const std::vector<int>& tokens, int first) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = [&](int position) { return tokens[position]; };
  for (int i = first; i < int(tokens.size()); ++i)
    for (int order = 0; order < kOrders; ++order)
      if (i >= kOldest[order]) count(order, key(at, i, kOldest[order]), tokens[i]);
}

// A successor that is right again becomes surer, one that is wrong half as sure; who is not sure at all is replaced. So is,
// after some time, what has not come up again.
void Successors::count(int order, uint64_t key, int next) {
  Entry& entry = this->entry(order, key);
  const bool same = entry.next >= 0 && entry.tag == uint32_t(key);
  if (same && entry.next == next) {
    entry.count = std::min(entry.count + 1, kCounts - 1);
  } else if (entry.count > 0) {
    entry.count /= 2;
  } else {
    entry = {uint32_t(key), next, 0};
  }
}

void Successors::know(const std::vector<std::array<int, 4>>& counted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [before, last, next, times] : counted) {
    const int order = before < 0 ? 1 : 0;
    const uint64_t key = order == 0 ? mix(mix(0, before), last) : mix(0, last);
    Entry& entry = this->entry(order, key);
    if (entry.next < 0 || entry.count <= times) entry = {uint32_t(key), next, std::clamp(times, 0, kCounts - 1)};
  }
}

std::optional<Draft> Successors::propose(const TokenAt& at, int known) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<Draft> best;
  for (int order = 0; order < kOrders; ++order) {
    if (known < kOldest[order]) continue;
    const uint64_t sum = key(at, known, kOldest[order]);
    const Entry& entry = this->entry(order, sum);
    if (entry.next < 0 || entry.tag != uint32_t(sum)) continue;
    const int bucket = order * kCounts + entry.count;
    const double chance = chances_[bucket].accepted / chances_[bucket].judged;
    if (!best || chance > best->confidence) best = Draft{entry.next, chance, kFromSuccessors + bucket};
  }
  return best;
}

void Successors::observe(const std::vector<Draft>& judged, int accepted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < int(judged.size()); ++i) {
    if (judged[i].copied < kFromSuccessors) continue;
    Chance& chance = chances_[size_t(judged[i].copied - kFromSuccessors)];
    chance = {kDiscount * chance.accepted + (i < accepted), kDiscount * chance.judged + 1.0};
  }
}

}  // namespace ppsd
