// Stages of a model that is only a hash: the next token depends on the whole text before it. For planning, where only
// the costs matter, and for tests: these stages refuse messages that leave a gap or carry another row's hidden state.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <vector>

#include "carrier.h"
#include "oracle.h"

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
  ToyRows(const ToyModel& model, int capacity)
      : model_(model), ids_(capacity), hashes_(capacity), siblings_(kSiblingPlaces), sibling_hashes_(kSiblingPlaces) {}

  // What a message says: the sibling that the text goes on with, rows, and siblings beside them.
  void append(const std::optional<Sibling>& adopted, int start, const std::vector<int>& ids,
              const std::vector<Sibling>& siblings) {
    if (adopted) {
      const int position = adopted->position, place = position % kSiblingPlaces;
      if (position + 1 != start || siblings_[place].position != position || siblings_[place].id != adopted->id)
        throw std::logic_error("a sibling is adopted that did not come");
      if (position > length_.load(std::memory_order_relaxed)) throw std::logic_error("a sibling left a gap");
      ids_[position] = adopted->id;
      hashes_[position] = sibling_hashes_[place];
      length_.store(start, std::memory_order_relaxed);
    }
    int length = length_.load(std::memory_order_relaxed);
    if (start > length) throw std::logic_error("a message left a gap");
    length = start;
    for (int id : ids) {
      hashes_.at(length) = model_.after(length > 0 ? hashes_[length - 1] : model_.empty(), id);
      ids_[length++] = id;
    }
    for (const Sibling& sibling : siblings) {
      const int position = sibling.position, place = position % kSiblingPlaces;
      if (position < start || position >= length) throw std::logic_error("a sibling without its row");
      siblings_[place] = sibling;
      sibling_hashes_[place] = model_.after(position > 0 ? hashes_[position - 1] : model_.empty(), sibling.id);
    }
    length_.store(length, std::memory_order_relaxed);
  }
  int length() const { return length_.load(std::memory_order_relaxed); }
  int id(int row) const { return ids_.at(row); }
  int next_after(int row) const { return model_.next(hashes_.at(row)); }
  int next_after(const Sibling& sibling) const {
    if (siblings_[sibling.position % kSiblingPlaces].position != sibling.position) throw std::logic_error("another sibling");
    return model_.next(sibling_hashes_[sibling.position % kSiblingPlaces]);
  }

 private:
  const ToyModel model_;
  std::vector<int> ids_;           // never resized: another thread may be reading earlier rows
  std::vector<uint64_t> hashes_;
  std::vector<Sibling> siblings_;  // by position modulo kSiblingPlaces
  std::vector<uint64_t> sibling_hashes_;
  std::atomic<int> length_{0};
};

class ToyDraft final : public DraftStage {
 public:
  // acceptance[i]: of a draft token that i others wait in front of; the last entry goes for all further ones.
  // second: of the second choice, where the first is wrong.
  ToyDraft(const ToyModel& model, int capacity, std::vector<double> acceptance, uint64_t seed, double second = 0.0)
      : model_(model), rows_(model, capacity), acceptance_(std::move(acceptance)), seed_(seed), second_(second) {}

  bool step(const DraftStep& step, Draft* draft, const Cancelled&) override {
    rows_.append(step.adopted, step.start, step.ids, step.siblings);
    if (draft == nullptr) return true;
    const double acceptance = acceptance_[std::min(size_t(step.place), acceptance_.size() - 1)];
    const int position = rows_.length(), truth = rows_.next_after(position - 1);
    *draft = feigned(truth, model_.vocabulary, acceptance, second_, seed_, position);
    return true;
  }
  void export_hidden(Chunk* chunk) override {   // a row's hidden state is its token, raised by 1 in every stage
    if (chunk->start + chunk->rows() > rows_.length()) throw std::logic_error("rows that have not been run");
    chunk->hidden.clear();
    for (int r = 0; r < chunk->rows(); ++r) chunk->hidden.push_back(float(rows_.id(chunk->start + r)));
    for (const Sibling& sibling : chunk->siblings) chunk->hidden.push_back(float(sibling.id));
  }

 private:
  const ToyModel model_;
  ToyRows rows_;
  const std::vector<double> acceptance_;
  const uint64_t seed_;
  const double second_;
};

class ToyVerify final : public VerifyStage {
 public:
  ToyVerify(const ToyModel& model, int capacity, int stage) : rows_(model, capacity), stage_(stage) {}

  bool run(Chunk* chunk, const Cancelled&) override {
    if (int(chunk->hidden.size()) != chunk->all_rows()) throw std::logic_error("rows without hidden states");
    const auto id = [&](int r) { return r < chunk->rows() ? chunk->ids[r] : chunk->siblings[r - chunk->rows()].id; };
    for (int r = 0; r < chunk->all_rows(); ++r)
      if (chunk->hidden[r]++ != float(id(r) + stage_)) throw std::logic_error("another row's hidden state");
    rows_.append(chunk->adopted, chunk->start, chunk->ids, chunk->siblings);
    return true;
  }
  std::vector<int> choose(const Chunk& chunk, int last) override {
    std::vector<int> chosen;
    const int end = chunk.start + chunk.rows();
    for (int row = end - last; row < end; ++row) chosen.push_back(rows_.next_after(row));
    for (const Sibling& sibling : chunk.siblings) chosen.push_back(rows_.next_after(sibling));
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

  Toy(int tokens, std::vector<double> acceptance, uint64_t seed, size_t stages, double second = 0.0)
      : limits{kPrompt + 1 + tokens, {}}, draft({seed}, limits.end, std::move(acceptance), seed, second) {
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
