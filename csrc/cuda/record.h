// The rings that kernels write and the host reads, in mapped memory: twins of the words in triton_kernels/state.py.
//
// A record's sequence number is written last and released to the system; it is never taken back. Numbers go on from
// answer to answer, so that an old record is never taken for a new one.
#pragma once

#include <cstdint>
#include <cstring>

#include "../pipeline/schedule.h"
#include "plan.h"

namespace ppsd::cuda {

namespace record {
// Of a verdict.
constexpr int kSequence = 0, kEpoch = 1, kPosition = 2, kRows = 3, kAccepted = 4, kCommitted = 5, kJudged = 6, kDrafted = 7;
constexpr int kIds = 16, kDrafts = 32, kConfidences = 48, kWords = 64;
// Of a draft step.
constexpr int kDraftEpoch = 1, kDraftPosition = 2, kDraftToken = 3, kDraftConfidence = 4, kDraftWords = 8;
}  // namespace record

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
  const auto count = [&](int place) { return size_t(words[place] < 0 ? 0 : words[place] > kMaxRows ? kMaxRows : words[place]); };
  out.committed.assign(words + record::kIds, words + record::kIds + count(record::kCommitted));
  for (size_t i = 0; i < count(record::kJudged); ++i)
    out.judged.push_back({words[record::kDrafts + int(i)], float_of(words[record::kConfidences + int(i)])});
  return out;
}

}  // namespace ppsd::cuda
