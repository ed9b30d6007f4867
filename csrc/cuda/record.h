// The rings that kernels write and the host reads, in mapped memory: twins of the words in triton_kernels/state.py.
//
// A record's sequence number is written last and released to the system; it is never taken back. Numbers go on from
// answer to answer, so that an old record is never taken for a new one.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "../core/schedule.h"
#include "plan.h"

namespace ppsd::cuda {

namespace record {
// Of a verdict.
constexpr int kSequence = 0, kEpoch = 1, kPosition = 2, kRows = 3, kAccepted = 4, kCommitted = 5, kJudged = 6, kDrafted = 7;
constexpr int kCopied = 8;
constexpr int kIds = 16, kDrafts = 32, kConfidences = 48, kCopies = 64, kWords = 80;
// Of a draft step.
constexpr int kDraftEpoch = 1, kDraftPosition = 2, kDraftToken = 3, kDraftConfidence = 4, kDraftWords = 8;
}  // namespace record

// What the host offers the device to draft: words that it overwrites at any time. The device may read half of an old one:
// every word is whole, so what it drafts then is a token too.
namespace offer {
constexpr int kPosition = 0, kCount = 1, kMost = 2, kTokens = 16, kChances = 32, kCopies = 48, kWords = 64;
}  // namespace offer

inline int32_t bits_of(double value) {
  const float single = float(value);
  int32_t bits;
  std::memcpy(&bits, &single, sizeof bits);
  return bits;
}

inline double float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return double(value);
}

class Ring {
 public:
  Ring() = default;
  Ring(const int32_t* words, int slots, int width) : words_(words), slots_(slots), width_(width) {}

  int slots() const { return slots_; }
  // The record of this number, or null while it has not been written.
  const int32_t* find(int32_t sequence) const {
    const int32_t* found = words_ + size_t(uint32_t(sequence) % uint32_t(slots_)) * size_t(width_);
    return __atomic_load_n(found, __ATOMIC_ACQUIRE) == sequence ? found : nullptr;
  }

 private:
  const int32_t* words_ = nullptr;
  int slots_ = 0, width_ = 0;
};

inline Record record_of(const int32_t* words) {
  Record out;
  out.epoch = words[record::kEpoch];
  out.position = words[record::kPosition];
  out.rows = words[record::kRows];
  out.accepted = words[record::kAccepted];
  out.copied = words[record::kCopied];
  const auto count = [&](int place) { return size_t(words[place] < 0 ? 0 : words[place] > kMaxRows ? kMaxRows : words[place]); };
  out.committed.assign(words + record::kIds, words + record::kIds + count(record::kCommitted));
  for (size_t i = 0; i < count(record::kJudged); ++i)
    out.judged.push_back({words[record::kDrafts + int(i)], float_of(words[record::kConfidences + int(i)]),
                          words[record::kCopies + int(i)]});
  return out;
}

inline void write_offer(const Offer& from, int32_t* words) {
  const auto put = [&](int place, int32_t value) { __atomic_store_n(words + place, value, __ATOMIC_RELAXED); };
  if (from.drafts.size() > size_t(offer::kChances - offer::kTokens)) throw std::logic_error("an offer has too many drafts");
  put(offer::kCount, 0);
  for (size_t i = 0; i < from.drafts.size(); ++i) {
    put(offer::kTokens + int(i), from.drafts[i].token);
    put(offer::kChances + int(i), bits_of(from.drafts[i].confidence));
    put(offer::kCopies + int(i), from.drafts[i].copied);
  }
  put(offer::kPosition, from.position);
  put(offer::kMost, from.most);
  __atomic_store_n(words + offer::kCount, int32_t(from.drafts.size()), __ATOMIC_RELEASE);
}

}  // namespace ppsd::cuda
