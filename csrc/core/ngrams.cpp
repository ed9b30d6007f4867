#include "ngrams.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace ppsd {
namespace {

constexpr double kWeight = 8.0;       // proposals that a prior counts as
constexpr double kDiscount = 0.995;   // what older ones of the same kind keep at each
constexpr int kMost = 7;              // of a count
// Measured on 900 greedy answers of the default model, by the match's length, and then by count.
constexpr double kPrior[2][8][4] = {
    {{0.10, 0.14, 0.24, 0.27}, {0.14, 0.22, 0.32, 0.48}, {0.21, 0.32, 0.45, 0.58}, {0.25, 0.39, 0.45, 0.58},
     {0.36, 0.60, 0.64, 0.70}, {0.40, 0.65, 0.82, 0.85}, {0.60, 0.85, 0.95, 0.97}, {0.95, 0.98, 0.98, 0.99}},
    {{0.24, 0.42, 0.56, 0.64}, {0.49, 0.69, 0.82, 0.89}, {0.60, 0.78, 0.88, 0.90}, {0.72, 0.85, 0.90, 0.96},
     {0.79, 0.92, 0.97, 0.97}, {0.85, 0.95, 0.98, 0.98}, {0.89, 0.97, 0.97, 0.98}, {0.94, 0.99, 0.99, 0.99}}};

uint64_t mix(uint64_t sum, int token) {
  sum = (sum + uint64_t(token) + 1) * 0x9E3779B97F4A7C15u;
  return sum ^ (sum >> 29);
}

// Every bit of an owner changes every other one, so that no owner and token make up for another owner and token (SplitMix64).
uint64_t mixed(uint64_t owner) {
  uint64_t sum = owner + 0x9E3779B97F4A7C15u;
  sum = (sum ^ (sum >> 30)) * 0xBF58476D1CE4E5B9u;
  sum = (sum ^ (sum >> 27)) * 0x94D049BB133111EBu;
  return sum ^ (sum >> 31);
}

}  // namespace

Ngrams::Ngrams(size_t bytes, uint32_t clock) : memory_(nullptr, std::free), clock_(clock) {
  while (shift_ > 32 && (size_t(1) << (65 - shift_)) * sizeof(Set) <= bytes) --shift_;
  memory_.reset(std::calloc((size_t(1) << (64 - shift_)) + 1, sizeof(Set)));
  if (!memory_) throw std::bad_alloc();
  sets_ = reinterpret_cast<Set*>((reinterpret_cast<uintptr_t>(memory_.get()) + sizeof(Set) - 1) / sizeof(Set) * sizeof(Set));
  for (size_t kind = 0; kind < chances_.size(); ++kind)
    chances_[kind] = {kWeight * kPrior[2 * kind / kKinds][kind / kCounts % kOrders.size()][kind % kCounts], kWeight};
}

Ngrams::Text Ngrams::begin(uint64_t owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (++texts_ == 0) ++texts_;
  return {mixed(owner), texts_};
}

// Of the tokens before position `end`, by order -> how many there are. Their sets are on the way into the caches then.
template <class At>
int Ngrams::keys(const At& at, int end, uint64_t owner, Keys* keys, int longest) const {
  uint64_t sum = owner;
  int order = 0;
  for (int back = 1; back <= std::min(end, longest); ++back) {
    sum = mix(sum, at(end - back));
    if (back != kOrders[size_t(order)]) continue;
    (*keys)[size_t(order)] = sum * 0xD6E8FEB86659FD93u;
    __builtin_prefetch(&sets_[(*keys)[size_t(order++)] >> shift_]);
  }
  return order;
}

const Ngrams::Entry* Ngrams::find(uint64_t key) const {
  for (const Entry& entry : sets_[key >> shift_].entries)
    if (entry.used != 0 && entry.tag == uint32_t(key)) return &entry;
  return nullptr;
}

// Its entry, or the one that is longest out of use, emptied.
Ngrams::Entry* Ngrams::claim(uint64_t key) {
  if (const Entry* known = find(key)) return const_cast<Entry*>(known);
  auto& entries = sets_[key >> shift_].entries;
  Entry& oldest = *std::min_element(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  oldest = {uint32_t(key), 0, -1, 0, 0};
  return &oldest;
}

void Ngrams::count() {
  if (++counted_ < clock_) return;
  const auto older = [](uint32_t used) { return used / 2 + used % 2; };   // 0 stays 0 alone
  for (Set* set = sets_; set < sets_ + (size_t(1) << (64 - shift_)); ++set)
    for (Entry& entry : set->entries)
      if (entry.used != 0) entry.used = older(entry.used);
  counted_ = older(counted_);
}

// What follows again becomes surer. What follows no more becomes half as sure, or is replaced: at once where another text
// has said so.
void Ngrams::learn(const std::vector<int>& tokens, int first, int seen, const Text& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = [&](int position) { return tokens[size_t(position)]; };
  Keys keys, next;
  int orders = 0, next_orders = this->keys(at, first, text.owner, &next);
  for (int i = first; i < int(tokens.size()); ++i) {
    keys = next, orders = next_orders;
    if (i + 1 < int(tokens.size())) next_orders = this->keys(at, i + 1, text.owner, &next);
    count();
    for (int order = 0; order < orders; ++order) {
      Entry& entry = *claim(keys[size_t(order)]);
      const bool own = entry.used != 0 && entry.text == text.number;
      if (entry.used != 0 && entry.next == tokens[size_t(i)]) {
        if (own || i >= seen) entry.count = uint16_t(std::min(entry.count + 1, kMost));
      } else if (own && entry.count > 0) {
        entry.count /= 2;
      } else {
        entry.next = tokens[size_t(i)], entry.count = 0;
      }
      entry.text = text.number, entry.used = counted_;
    }
  }
}

void Ngrams::know(const std::vector<std::array<int, 4>>& counted) {
  const auto known = std::make_shared<Ngrams>(4 * counted.size() * sizeof(Entry));
  for (const auto& [before, last, next, times] : counted) {
    Keys keys;
    const std::array<int, 2> tokens{before, last};
    const int orders = known->keys([&](int position) { return tokens[size_t(position)]; }, 2, 0, &keys);
    Entry& entry = *known->claim(keys[size_t(before < 0 ? 0 : orders - 1)]);
    if (entry.used == 0 || entry.count <= times) entry.next = next, entry.count = uint16_t(std::clamp(times, 0, kMost));
    entry.used = 1;
  }
  known_ = known;
}

// What is known of all texts comes after what was said in the owner's, of the same length.
std::optional<Draft> Ngrams::propose(const TokenAt& at, int known, const Text& text, int shortest, bool others) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Keys keys, usual;
  const int usuals = others && known_ ? known_->keys(at, known, 0, &usual, 2) : 0;
  for (int order = this->keys(at, known, text.owner, &keys) - 1; order >= 0; --order) {
    const Entry* entry = find(keys[size_t(order)]);
    if (entry == nullptr && order < usuals) entry = known_->find(usual[size_t(order)]);
    if (entry == nullptr) continue;
    const bool own = entry->text == text.number;
    if (!others && !(own && shortest > 0 && kOrders[size_t(order)] >= shortest)) continue;
    const int kind = (int(own) * int(kOrders.size()) + order) * kCounts + std::min<int>(entry->count, kCounts - 1);
    return Draft{entry->next, chances_[size_t(kind)].right / chances_[size_t(kind)].all, 1 + kind};
  }
  return std::nullopt;
}

void Ngrams::observe(int copied, bool right) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Chance& chance = chances_[size_t(copied - 1)];
  chance = {kDiscount * chance.right + right, kDiscount * chance.all + 1.0};
}

}  // namespace ppsd
