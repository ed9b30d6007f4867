// What the captured stages of a model do, on a toy model (csrc/tests/toy_model.h): twins of triton_kernels/verdict.py.
//
// Draft steps and passes run on threads of the fake driver, side by side. As on a GPU, the words of the answer change
// under its lock alone, and text, rows and hidden states are read and written without one. Stages may stand for other
// devices: what they read there has to be copied, mail and epoch too (ppsd_rt/cuda/devices.py).
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../cuda/record.h"
#include "toy_model.h"
#include "check.h"

namespace ppsd::test {

class ToyDevice {
 public:
  static constexpr int kSlots = 64, kMail = 8, kMailWords = 20, kHome = 0, kDevices = 2;
  using Memory = std::vector<std::atomic<int32_t>>;

  // on: the device of each verification stage; drafting and verdicts are on device kHome.
  ToyDevice(const ToyModel& model, int capacity, std::vector<int> on, double acceptance, uint64_t seed)
      : model_(model), acceptance_(acceptance), seed_(seed), on_(std::move(on)), text_(size_t(capacity)),
        early_rows_(size_t(capacity)), confidences_(size_t(capacity)), verdicts_(kSlots * cuda::record::kWords),
        drafts_(kSlots * cuda::record::kDraftWords), offer_(cuda::offer::kWords), copied_(size_t(capacity)),
        epochs_(kDevices) {
    for (size_t stage = 0; stage < on_.size(); ++stage) {
      stages_.push_back(std::make_unique<Stage>());
      stages_.back()->rows = std::vector<std::atomic<uint64_t>>(size_t(capacity));
    }
    // In front of each stage, and after the last one: what the one before has written, and where it is read.
    for (int border = 0; border <= int(on_.size()); ++border) {
      for (auto& [to, size] : {std::make_pair(&rows_, capacity), std::make_pair(&mail_, kMail * kMailWords)}) {
        to->written.push_back(std::make_unique<Memory>(size_t(size)));
        to->read.push_back(apart(border) ? std::make_unique<Memory>(size_t(size)) : nullptr);
      }
      counts_.push_back(std::make_unique<Counts>());
    }
  }

  int stages() const { return int(on_.size()); }
  int device(int stage) const { return stage < 0 || stage >= int(on_.size()) ? kHome : on_[size_t(stage)]; }
  bool apart(int border) const { return device(border) != device(border - 1); }

  // Two blocks of memory of a border, or the same one twice.
  struct Ends {
    const void *to, *from;
  };
  Ends rows(int border) const { return {rows_.at(border)->data(), rows_.written[size_t(border)]->data()}; }
  Ends mail(int border) const { return {mail_.at(border)->data(), mail_.written[size_t(border)]->data()}; }
  Ends epoch_on(int device) const { return {&epochs_[size_t(device)], &epochs_[kHome]}; }

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
    for (auto& epoch : epochs_) epoch = 0;
    for (auto& counts : counts_) counts->posted = counts->fetched = 0;
    taken_ = {}, taken_.start = rows;
    most_ = most, lookahead_ = lookahead, limit_ = end - 1, report_ = report;
    early_ = {}, early_.start = rows;
    offer_.assign(offer_.size(), 0);
  }

  int draft_step(bool with_head) {
    Words at;
    {
      const Lock lock(mutex_);
      take_offer();
      if (early_.epoch != state_.epoch) early_.start = std::min(early_.start, state_.start);
      early_.epoch = state_.epoch;
      at = early_;
      at.rows = std::max(0, std::min(std::min(state_.drafted, limit_) - at.start, kMaxRows));
    }
    delay();
    for (int p = at.start; p < at.start + at.rows; ++p) {
      const int token = text_[size_t(p)];
      early_rows_[size_t(p)] = model_.after(p > 0 ? early_rows_[size_t(p - 1)].load() : model_.empty(), token);
      (*rows_.written[0])[size_t(p)] = token;
    }
    const int end = at.start + at.rows;
    delay();
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
        copied_[size_t(end)] = 0;
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

  // The first stage is on another device: its rows are taken here.
  int take() {
    take_rows();
    post(0, taken_, nullptr);
    return 0;
  }

  int verify(int number) {
    Stage& stage = *stages_[size_t(number)];
    const int last = int(stages_.size()) - 1;
    Words at;
    if (number == 0 && !apart(0)) {
      take_rows();
      at = taken_;
    } else {
      at = fetch(number, nullptr);
    }
    delay();
    const Memory& input = *rows_.at(number);
    for (int p = at.start; p < at.start + at.rows; ++p) {
      const int token = input[size_t(p)];
      stage.rows[size_t(p)] = model_.after(p > 0 ? stage.rows[size_t(p - 1)].load() : model_.empty(), token);
      if (number < last) (*rows_.written[size_t(number) + 1])[size_t(p)] = token;
    }
    delay();
    if (number < last) {
      post(number + 1, at, nullptr);
      return 0;
    }
    int choices[kMaxRows] = {};
    for (int r = 0; r < at.rows; ++r) choices[r] = model_.next(stage.rows[size_t(at.start + r)]);
    if (apart(number + 1)) post(number + 1, at, choices);
    else give_verdict(at, choices);
    return 0;
  }

  // The last stage is on another device: its choices are judged here.
  int verdict() {
    int choices[kMaxRows];
    const Words at = fetch(int(on_.size()), choices);
    give_verdict(at, choices);
    return 0;
  }

  void slow_down(int most_us, uint64_t seed) { delay_us_ = most_us, random_ = seed; }
  int sequence() const { return state_.sequence; }
  int drawn() const { return state_.drawn; }
  cuda::Ring verdicts() const { return {verdicts_.data(), kSlots, cuda::record::kWords}; }
  int32_t* offer() { return offer_.data(); }
  cuda::Ring drafts() const { return {drafts_.data(), kSlots, cuda::record::kDraftWords}; }

 private:
  using Lock = std::lock_guard<std::mutex>;
  struct Words {
    int rows = 0, start = 0, epoch = 0;
  };
  struct State {
    int start = 0, epoch = 0, drafted = 0;
    int32_t sequence = 0, drawn = 0;
  };
  struct Stage {
    std::vector<std::atomic<uint64_t>> rows;   // KV: the hash of the text up to and including a row
  };

  struct Border {   // a row's hidden state is its token
    std::vector<std::unique_ptr<Memory>> written, read;
    const std::unique_ptr<Memory>& at(int border) const { return read[size_t(border)] ? read[size_t(border)] : written[size_t(border)]; }
  };
  struct Counts {
    int posted = 0, fetched = 0;
  };

  // As begin_draft_kernel does, in the middle of whatever the host writes there.
  void take_offer() {
    const auto word = [&](int place) { return __atomic_load_n(&offer_[size_t(place)], __ATOMIC_RELAXED); };
    const int count = std::clamp(word(cuda::offer::kCount), 0, kMaxRows), from = word(cuda::offer::kPosition);
    const int room = std::min(limit_, state_.start + 1 + word(cuda::offer::kMost));
    if (from <= 0 || from > state_.drafted) return;
    int tokens[kMaxRows] = {};
    for (int i = 0; i < count; ++i) {
      tokens[i] = word(cuda::offer::kTokens + i);
      if (from + i < state_.drafted && text_[size_t(from + i)] != tokens[i]) return;
    }
    for (int i = 0; i < count; ++i) {
      const int place = from + i;
      if (place != state_.drafted || place >= room) continue;
      text_[size_t(place)] = tokens[i];
      confidences_[size_t(place)] = float(cuda::float_of(word(cuda::offer::kChances + i)));
      copied_[size_t(place)] = word(cuda::offer::kCopies + i);
      ++state_.drafted;
    }
  }

  void take_rows() {
    const Lock lock(mutex_);
    const int launched = taken_.start + taken_.rows;
    const int arrived = early_.epoch == state_.epoch ? early_.start : 0;
    const int start = taken_.epoch == state_.epoch ? std::max(launched, state_.start) : state_.start;
    const int most = std::min(most_ + int(start == state_.start), kMaxRows);
    taken_ = {std::max(0, std::min(arrived - start, most)), start, state_.epoch};
  }

  void post(int border, const Words& at, const int* choices) {
    auto* slot = &(*mail_.written[size_t(border)])[size_t(counts_[size_t(border)]->posted++ % kMail * kMailWords)];
    slot[0] = at.rows, slot[1] = at.start, slot[2] = at.epoch;
    for (int r = 0; choices != nullptr && r < kMaxRows; ++r) slot[4 + r] = choices[r];
  }

  // What is read of a pass that another device began, and of its epoch, is what has been copied.
  Words fetch(int border, int* choices) {
    const auto* slot = &(*mail_.at(border))[size_t(counts_[size_t(border)]->fetched++ % kMail * kMailWords)];
    Words at{slot[0], slot[1], slot[2]};
    for (int r = 0; choices != nullptr && r < kMaxRows; ++r) choices[r] = slot[4 + r];
    if (at.epoch != epochs_[size_t(device(border))]) at.rows = 0;
    return at;
  }

  void give_verdict(const Words& at, const int* choices) {
    int drafts[kMaxRows] = {}, ids[kMaxRows] = {};
    int32_t sequence = 0;
    int accepted = 0, committed = 0, judged = 0, drafted = 0, copied = 0;
    {
      const Lock lock(mutex_);
      sequence = ++state_.sequence;
      drafted = state_.drafted;
      if (at.rows > 0 && at.epoch == state_.epoch) {
        bool rejected = false;
        for (int r = 0; r < at.rows && at.start + 1 + r < drafted; ++r) copied += copied_[size_t(at.start + 1 + r)] > 0;
        for (int r = 0; r < at.rows && !rejected; ++r) {
          const int place = at.start + 1 + r;
          if (place < drafted) {
            drafts[judged++] = text_[size_t(place)];
            rejected = drafts[judged - 1] != choices[r];
            accepted += !rejected;
          }
          ids[committed++] = text_[size_t(place)] = choices[r];
          if (place >= drafted) break;   // the bonus
        }
        const int end = at.start + committed;
        state_.start = end;
        state_.drafted = rejected ? end + 1 : std::max(drafted, end + 1);
        state_.epoch += rejected;
        epochs_[kHome] = state_.epoch;
      }
    }
    int32_t* record = &verdicts_[size_t(sequence % kSlots) * cuda::record::kWords];
    record[1] = at.epoch, record[2] = at.start + 1, record[3] = at.rows, record[4] = accepted, record[5] = committed;
    record[6] = judged, record[7] = drafted, record[cuda::record::kCopied] = copied;
    for (int r = 0; r < kMaxRows; ++r) {
      record[cuda::record::kIds + r] = r < committed ? ids[r] : -1;
      record[cuda::record::kDrafts + r] = drafts[r];
      record[cuda::record::kConfidences + r] = r < judged ? bits(confidences_[size_t(at.start + 1 + r)]) : 0;
      record[cuda::record::kCopies + r] = r < judged ? copied_[size_t(at.start + 1 + r)].load() : 0;
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
  const std::vector<int> on_;
  std::mutex mutex_;   // the answer's lock
  State state_;
  Words early_;
  int most_ = 0, lookahead_ = 0, limit_ = 0;
  bool report_ = false;
  std::vector<std::atomic<int32_t>> text_;
  std::vector<std::atomic<uint64_t>> early_rows_;
  std::vector<std::atomic<float>> confidences_;
  std::vector<std::unique_ptr<Stage>> stages_;
  Border rows_, mail_;
  std::vector<std::unique_ptr<Counts>> counts_;   // of each border
  Words taken_;                                   // of the pass that was begun last
  std::vector<int32_t> verdicts_, drafts_, offer_;
  Memory copied_;
  Memory epochs_;                                 // at home, and copies of it
  int delay_us_ = 0;
  std::atomic<uint64_t> random_{1};
};

}  // namespace ppsd::test
