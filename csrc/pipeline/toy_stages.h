// Stages of a model that is only a hash: the next token depends on the whole text before it. For planning, where only
// the costs matter, and for tests: these stages refuse messages that leave a gap or carry another row's hidden state.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include "carrier.h"
#include "noise.h"

namespace ppsd {

struct ToyModel {
  uint64_t seed = 0;
  int vocabulary = 1000;
  bool forgets = false;   // the next token depends on the last one alone: texts repeat themselves

  uint64_t empty() const { return mix(seed); }
  uint64_t after(uint64_t text, int token) const { return mix((forgets ? seed : text) + uint64_t(token) + 1); }
  int next(uint64_t text) const { return int(text % uint64_t(vocabulary)); }

  // What plain decoding gives: the prompt and `count` tokens.
  std::vector<int> plain(std::vector<int> tokens, int count) const {
    uint64_t text = empty();
    for (int token : tokens) text = after(text, token);
    for (int i = 0; i < count; ++i) {
      tokens.push_back(next(text));
      text = after(text, tokens.back());
    }
    return tokens;
  }

 private:
  static uint64_t mix(uint64_t x) {   // splitmix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
};

// The rows of a text that have passed a stage: hashes[p] stands for the text up to and including token p.
class ToyRows {
 public:
  ToyRows(const ToyModel& model, int capacity) : model_(model), ids_(capacity), hashes_(capacity) {}

  void append(int start, const std::vector<int>& ids) {
    int length = length_.load(std::memory_order_relaxed);
    if (start > length) throw std::logic_error("a message left a gap");
    length = start;
    for (int id : ids) {
      hashes_.at(length) = model_.after(length > 0 ? hashes_[length - 1] : model_.empty(), id);
      ids_[length++] = id;
    }
    length_.store(length, std::memory_order_relaxed);
  }
  int length() const { return length_.load(std::memory_order_relaxed); }
  int id(int row) const { return ids_.at(row); }
  int next_after(int row) const { return model_.next(hashes_.at(row)); }

 private:
  const ToyModel model_;
  std::vector<int> ids_;           // never resized: another thread may be reading earlier rows
  std::vector<uint64_t> hashes_;
  std::atomic<int> length_{0};
};

class ToyDraft final : public DraftStage {
 public:
  // acceptance[i]: of a draft token that i others wait in front of; the last entry goes for all further ones.
  ToyDraft(const ToyModel& model, int capacity, std::vector<double> acceptance, uint64_t seed)
      : model_(model), rows_(model, capacity), acceptance_(std::move(acceptance)), seed_(seed) {}

  bool step(const DraftStep& step, Draft* draft, const Cancelled&) override {
    rows_.append(step.start, step.ids);
    if (draft == nullptr) return true;
    const size_t place = std::min(size_t(step.place), acceptance_.size() - 1);
    const int truth = rows_.next_after(rows_.length() - 1);
    const bool right = coin(seed_, rows_.length()) < acceptance_[place];
    *draft = {right ? truth : (truth + 1) % model_.vocabulary, acceptance_[place]};
    return true;
  }
  void export_hidden(Chunk* chunk) override {   // a row's hidden state is its token, raised by 1 in every stage
    if (chunk->start + chunk->rows() > rows_.length()) throw std::logic_error("rows that have not been run");
    chunk->hidden.clear();
    for (int r = 0; r < chunk->rows(); ++r) chunk->hidden.push_back(float(rows_.id(chunk->start + r)));
  }

 private:
  const ToyModel model_;
  ToyRows rows_;
  const std::vector<double> acceptance_;
  const uint64_t seed_;
};

class ToyVerify final : public VerifyStage {
 public:
  ToyVerify(const ToyModel& model, int capacity, int stage) : rows_(model, capacity), stage_(stage) {}

  bool run(Chunk* chunk, const Cancelled&) override {
    if (int(chunk->hidden.size()) != chunk->rows()) throw std::logic_error("rows without hidden states");
    for (int r = 0; r < chunk->rows(); ++r)
      if (chunk->hidden[r]++ != float(chunk->ids[r] + stage_)) throw std::logic_error("another row's hidden state");
    rows_.append(chunk->start, chunk->ids);
    return true;
  }
  std::vector<int> choose(const Chunk& chunk, int last) override {
    std::vector<int> chosen;
    const int end = chunk.start + chunk.rows();
    for (int row = end - last; row < end; ++row) chosen.push_back(rows_.next_after(row));
    return chosen;
  }

 private:
  ToyRows rows_;
  const int stage_;
};

// The stages of a toy model whose answer to a prompt of one token is `tokens` long after the prompt's own.
struct Toy {
  static constexpr int kPrompt = 1;
  Limits limits;
  ToyDraft draft;
  std::vector<std::unique_ptr<ToyVerify>> verify;

  Toy(int tokens, std::vector<double> acceptance, uint64_t seed, size_t stages)
      : limits{kPrompt + 1 + tokens, {}}, draft({seed}, limits.end, std::move(acceptance), seed) {
    for (size_t stage = 0; stage < stages; ++stage)
      verify.push_back(std::make_unique<ToyVerify>(ToyModel{seed}, limits.end, int(stage)));
  }
  Stages stages() {
    Stages stages{&draft, {}};
    for (const auto& stage : verify) stages.verify.push_back(stage.get());
    return stages;
  }
  static std::vector<int> prompt() { return std::vector<int>(kPrompt, 0); }
};

}  // namespace ppsd
