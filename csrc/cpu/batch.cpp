#include "batch.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "half.h"

namespace ppsd {
namespace {

const std::vector<int> kWholeVocabulary;

}  // namespace

CpuBatch::CpuBatch(std::shared_ptr<const CpuModel> model, int threads, int texts, int capacity,
                   const std::vector<int>& keep)
    : model_(std::move(model)),
      texts_(texts),
      capacity_(capacity),
      keep_(keep),
      team_(threads, {}),   // not pinned: other processes may sample beside this one
      rope_(make_rope(model_->rotary, capacity)),
      x_(size_t(texts) * model_->shape.hidden_size),
      head_(*model_->kernels, model_->shape, model_->head, kWholeVocabulary, threads),
      positions_(texts),
      chosen_for_(texts),
      choices_(texts),
      best_(threads),
      strange_(threads) {
  if (texts < 1 || texts > kPassRows) throw std::runtime_error("a pass takes 1 to " + std::to_string(kPassRows) + " texts");
  const int layers = model_->shape.num_layers;
  int first = 0;
  const auto stack_up_to = [&](int last) {
    stacks_.emplace_back(*model_->kernels, model_->shape, model_->format, model_->kv,
                         pointers(model_->layers, first, last), threads, texts);
    stacks_.back().reserve(capacity);
    first = last;
  };
  for (int layer : keep) {
    if (layer < first || layer > layers) throw std::runtime_error("layers to keep must be in order, from 0 to the last");
    stack_up_to(layer);
  }
  stack_up_to(layers);
}

void CpuBatch::step(const BatchRow* rows, int* chosen, uint16_t* kept) {
  const int hidden = model_->shape.hidden_size;
  for (int text = 0; text < texts_; ++text) {
    const BatchRow& row = rows[text];
    if (row.position < 0 || row.position >= capacity_) throw std::runtime_error("a text is longer than the batch holds");
    if (row.id < 0 || row.id >= model_->shape.vocab_size) throw std::runtime_error("a token id is outside the vocabulary");
    embed(model_->embedding, row.id, x_.data() + size_t(text) * hidden);
    positions_[text] = row.position;
    chosen_for_[text] = row.position + 1;
    choices_[text] = {row.inverse_temperature, row.seed};
  }
  for (LayerStack& stack : stacks_) stack.begin_pass(positions_.data());
  head_.begin_pass(texts_);
  for (auto& best : best_) best.assign(texts_, {-std::numeric_limits<float>::infinity(), std::numeric_limits<int>::max()});
  for (auto& strange : strange_) strange.assign(texts_, 0);
  team_.run([&](int member) {
    for (size_t i = 0; i < stacks_.size(); ++i) {
      stacks_[i].pass(team_, member, rope_.data(), x_.data());
      // The next stack does not write to x before member 0 has come to its barriers.
      if (member == 0 && i < keep_.size()) keep(int(i), kept);
    }
    head_.pass_side_by_side(team_, member, x_.data(), chosen_for_.data(), choices_.data(), best_[member].data(),
                            strange_[member].data());
  });
  for (const auto& strange : strange_)
    if (std::find(strange.begin(), strange.end(), 1) != strange.end()) throw std::runtime_error(kNoNumber);
  for (int text = 0; text < texts_; ++text) {
    Candidate best = best_[0][text];
    for (const auto& others : best_)
      if (others[text] < best) best = others[text];
    chosen[text] = best.id;
  }
}

void CpuBatch::keep(int kind, uint16_t* kept) const {
  const size_t hidden = size_t(model_->shape.hidden_size);
  for (size_t text = 0; text < size_t(texts_); ++text)
    for (size_t i = 0; i < hidden; ++i)
      kept[(text * keep_.size() + size_t(kind)) * hidden + i] = float_to_bf16(x_[text * hidden + i]);
}

}  // namespace ppsd
