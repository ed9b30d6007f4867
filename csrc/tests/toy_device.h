// What the captured stages of a model do, on a toy model (csrc/pipeline/toy_stages.h): twins of triton_kernels/verdict.py.
//
// Draft steps and passes run on threads of the fake driver, side by side. As on a GPU, the words of the answer change
// under its lock alone, and text, rows and hidden states are read and written without one.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../cuda/record.h"
#include "../pipeline/toy_stages.h"
#include "check.h"

namespace ppsd::test {

class ToyDevice {
 public:
  static constexpr int kSlots = 64, kMail = 8;

  // own_memory: each stage's input rows are the last one's output only once they have been copied.
  ToyDevice(const ToyModel& model, int capacity, int stages, double acceptance, uint64_t seed, bool own_memory)
      : model_(model), acceptance_(acceptance), seed_(seed), text_(size_t(capacity)), early_rows_(size_t(capacity)),
        confidences_(size_t(capacity)), verdicts_(kSlots * cuda::record::kWords), drafts_(kSlots * cuda::record::kDraftWords) {
    for (int stage = 0; stage < stages; ++stage) {
      stages_.push_back(std::make_unique<Stage>());
      stages_.back()->rows = std::vector<std::atomic<uint64_t>>(size_t(capacity));
    }
    // The rows that a stage reads, and those that the one before has written.
    for (int border = 0; border < stages; ++border) {
      written_.push_back(std::make_unique<Hidden>(size_t(capacity)));
      read_.push_back(own_memory && border > 0 ? std::make_unique<Hidden>(size_t(capacity)) : nullptr);
    }
  }

  // The prompt but for its last row has passed all layers.
  void begin(const std::vector<int>& prompt, int end, int most, int lookahead, bool report) {
    uint64_t text = model_.empty();
    for (int p = 0; p < int(prompt.size()); ++p) {
      text_[size_t(p)] = prompt[size_t(p)];
      if (p + 1 == int(prompt.size())) break;
      text = model_.after(text, prompt[size_t(p)]);
      early_rows_[size_t(p)] = text;
      for (auto& stage : stages_) stage->rows[size_t(p)] = text;
    }
    const int rows = int(prompt.size()) - 1;
    state_.start = rows, state_.epoch = 0, state_.drafted = int(prompt.size());
    most_ = most, lookahead_ = lookahead, limit_ = end - 1, report_ = report;
    early_ = {}, early_.start = rows;
    for (auto& stage : stages_) stage->words = {}, stage->words.start = rows;
  }

  int draft_step(bool with_head) {
    Words at;
    {
      const Lock lock(mutex_);
      if (early_.epoch != state_.epoch) early_.start = std::min(early_.start, state_.start);
      early_.epoch = state_.epoch;
      at = early_;
      at.rows = std::max(0, std::min(std::min(state_.drafted, limit_) - at.start, kMaxRows));
    }
    delay();
    for (int p = at.start; p < at.start + at.rows; ++p) {
      const int token = text_[size_t(p)];
      early_rows_[size_t(p)] = model_.after(p > 0 ? early_rows_[size_t(p - 1)].load() : model_.empty(), token);
      (*written_[0])[size_t(p)] = token;
    }
    delay();
    const int end = at.start + at.rows;
    const int truth = model_.next(end > 0 ? early_rows_[size_t(end - 1)].load() : 0);
    const int token = coin(seed_, end) < acceptance_ ? truth : (truth + 1) % model_.vocabulary;
    bool drawn = false;
    int32_t sequence = 0;
    {
      const Lock lock(mutex_);
      const bool current = at.epoch == state_.epoch;
      if (current) early_.start = end;
      const bool room = state_.drafted < limit_ && state_.drafted - state_.start - 1 < lookahead_;
      drawn = with_head && current && end == state_.drafted && room;
      if (drawn) {
        text_[size_t(end)] = token;
        confidences_[size_t(end)] = float(acceptance_);
        ++state_.drafted;
      }
      if (with_head) sequence = ++state_.drawn;
    }
    if (with_head && report_) {
      int32_t* record = &drafts_[size_t(sequence % kSlots) * cuda::record::kDraftWords];
      record[1] = at.epoch, record[2] = drawn ? end : -1, record[3] = token, record[4] = bits(float(acceptance_));
      __atomic_store_n(record, sequence, __ATOMIC_RELEASE);
    }
    return 0;
  }

  int verify(int number) {
    Stage& stage = *stages_[size_t(number)];
    const int last = int(stages_.size()) - 1;
    if (number == 0) {
      const Lock lock(mutex_);
      const int launched = stage.words.start + stage.words.rows;
      const int arrived = early_.epoch == state_.epoch ? early_.start : 0;
      const int start = stage.words.epoch == state_.epoch ? std::max(launched, state_.start) : state_.start;
      const int most = std::min(most_ + int(start == state_.start), kMaxRows);
      stage.words = {std::max(0, std::min(arrived - start, most)), start, state_.epoch};
    } else {
      stage.words = stage.mail[size_t(stage.passes++ % kMail)];
      if (stage.words.epoch != epoch()) stage.words.rows = 0;
    }
    const Words at = stage.words;
    delay();
    for (int p = at.start; p < at.start + at.rows; ++p) {
      Hidden& input = read_[size_t(number)] ? *read_[size_t(number)] : *written_[size_t(number)];
      const int token = input[size_t(p)];
      stage.rows[size_t(p)] = model_.after(p > 0 ? stage.rows[size_t(p - 1)].load() : model_.empty(), token);
      if (number < last) (*written_[size_t(number) + 1])[size_t(p)] = token;
    }
    delay();
    if (number == last) {
      give_verdict(at, stage);
    } else {
      Stage& next = *stages_[size_t(number) + 1];
      next.mail[size_t(next.posted++ % kMail)] = at;
    }
    return 0;
  }

  void slow_down(int most_us, uint64_t seed) { delay_us_ = most_us, random_ = seed; }
  int sequence() const { return state_.sequence; }
  int drawn() const { return state_.drawn; }
  cuda::Ring verdicts() const { return {verdicts_.data(), kSlots, cuda::record::kWords}; }
  cuda::Ring drafts() const { return {drafts_.data(), kSlots, cuda::record::kDraftWords}; }
  const void* border_from(int stage) const { return written_[size_t(stage)]->data(); }
  const void* border_to(int stage) const { return read_[size_t(stage)] ? read_[size_t(stage)]->data() : border_from(stage); }

 private:
  using Lock = std::lock_guard<std::mutex>;
  using Hidden = std::vector<std::atomic<int32_t>>;   // a row's hidden state is its token
  struct Words {
    int rows = 0, start = 0, epoch = 0;
  };
  struct State {
    int start = 0, epoch = 0, drafted = 0;
    int32_t sequence = 0, drawn = 0;
  };
  struct Stage {
    Words words;
    Words mail[kMail];
    int64_t posted = 0, passes = 0;
    std::vector<std::atomic<uint64_t>> rows;   // KV: the hash of the text up to and including a row
  };

  int epoch() {
    const Lock lock(mutex_);
    return state_.epoch;
  }

  void give_verdict(const Words& at, const Stage& stage) {
    int choices[kMaxRows], drafts[kMaxRows] = {};
    for (int r = 0; r < at.rows; ++r) choices[r] = model_.next(stage.rows[size_t(at.start + r)]);
    int32_t sequence = 0;
    int accepted = 0, committed = 0, judged = 0, drafted = 0;
    {
      const Lock lock(mutex_);
      sequence = ++state_.sequence;
      drafted = state_.drafted;
      if (at.rows > 0 && at.epoch == state_.epoch) {
        bool rejected = false;
        for (int r = 0; r < at.rows && !rejected; ++r) {
          const int place = at.start + 1 + r;
          if (place < drafted) {
            drafts[judged++] = text_[size_t(place)];
            rejected = drafts[judged - 1] != choices[r];
            accepted += !rejected;
          }
          ++committed;
          text_[size_t(place)] = choices[r];
          if (place >= drafted) break;   // the bonus
        }
        const int end = at.start + committed;
        state_.start = end;
        state_.drafted = rejected ? end + 1 : std::max(drafted, end + 1);
        state_.epoch += rejected;
      }
    }
    int32_t* record = &verdicts_[size_t(sequence % kSlots) * cuda::record::kWords];
    record[1] = at.epoch, record[2] = at.start + 1, record[3] = at.rows, record[4] = accepted, record[5] = committed;
    record[6] = judged, record[7] = drafted;
    for (int r = 0; r < kMaxRows; ++r) {
      record[cuda::record::kIds + r] = r < committed ? choices[r] : -1;
      record[cuda::record::kDrafts + r] = drafts[r];
      record[cuda::record::kConfidences + r] = r < judged ? bits(confidences_[size_t(at.start + 1 + r)]) : 0;
    }
    __atomic_store_n(record, sequence, __ATOMIC_RELEASE);
  }

  static int32_t bits(float value) {
    int32_t out;
    std::memcpy(&out, &value, sizeof out);
    return out;
  }

  void delay() {
    if (delay_us_ == 0) return;
    const uint64_t toss = random_.fetch_add(0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u >> 33;
    if (toss % 3 == 0) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(toss % uint64_t(delay_us_));
    do std::this_thread::yield();
    while (std::chrono::steady_clock::now() < end);
  }

  const ToyModel model_;
  const double acceptance_;
  const uint64_t seed_;
  std::mutex mutex_;   // the answer's lock
  State state_;
  Words early_;
  int most_ = 0, lookahead_ = 0, limit_ = 0;
  bool report_ = false;
  std::vector<std::atomic<int32_t>> text_;
  std::vector<std::atomic<uint64_t>> early_rows_;
  std::vector<std::atomic<float>> confidences_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<std::unique_ptr<Hidden>> written_, read_;
  std::vector<int32_t> verdicts_, drafts_;
  int delay_us_ = 0;
  std::atomic<uint64_t> random_{1};
};

}  // namespace ppsd::test
