#include "batch.h"

#include <algorithm>
#include <stdexcept>

#include "half.h"

namespace ppsd {
namespace {

const std::vector<int> kWholeVocabulary;

}  // namespace

CpuBatch::CpuBatch(std::shared_ptr<const CpuModel> model, int threads, int texts, int capacity,
                   const std::vector<int>& keep)
    : model_(std::move(model)),
      capacity_(capacity),
      keep_(keep),
      team_(threads, {}),   // not pinned: other processes may sample beside this one
      rope_(make_rope(model_->rotary, capacity)),
      x_(size_t(texts) * model_->shape.hidden_size),
      head_(*model_->kernels, model_->shape, model_->head, kWholeVocabulary, threads) {
  if (texts < 1 || texts > kPassRows) throw std::runtime_error("a pass takes 1 to " + std::to_string(kPassRows) + " texts");
  const int layers = model_->shape.num_layers;
  int first = 0;
  const auto stack_up_to = [&](int last) {
    stacks_.emplace_back(*model_->kernels, model_->shape, model_->format, model_->kv, pointers(model_->layers, first, last),
                         threads, stacks_.empty() ? 0 : stacks_.back().end());
    first = last;
  };
  for (int layer : keep) {
    if (layer < first || layer > layers) throw std::runtime_error("layers to keep must be in order, from 0 to the last");
    stack_up_to(layer);
  }
  stack_up_to(layers);
  for (int text = 0; text < texts; ++text) {
    texts_.emplace_back(stacks_.back().end());
    texts_.back().hold(capacity, capacity);
  }
}

void CpuBatch::step(const BatchRow* rows, int* chosen, uint16_t* kept) {
  std::vector<Segment> segments;
  std::vector<int> positions;
  std::vector<RowChoice> choices;
  for (int text = 0; text < texts(); ++text) {
    const BatchRow& row = rows[text];
    if (row.position < 0 || row.position >= capacity_) throw std::runtime_error("a text is longer than the batch holds");
    if (row.id < 0 || row.id >= model_->shape.vocab_size) throw std::runtime_error("a token id is outside the vocabulary");
    embed(model_->embedding, row.id, x_.data() + size_t(text) * model_->shape.hidden_size);
    segments.push_back({1, row.position, texts_[text].pointers(), texts_[text].size()});
    positions.push_back(row.position + 1);
    choices.push_back({row.inverse_temperature, row.seed});
  }
  for (LayerStack& stack : stacks_) stack.begin_pass(segments);
  head_.begin_pass(x_.data(), positions, choices);
  team_.run([&](int member) {
    for (size_t i = 0; i < stacks_.size(); ++i) {
      stacks_[i].pass(team_, member, rope_.data(), x_.data());
      // The next stack does not write to x before member 0 has come to its barriers.
      if (member == 0 && i < keep_.size()) keep(int(i), kept);
    }
    head_.pass(team_, member);
  });
  const std::vector<int>& next = head_.chosen();
  if (std::find(next.begin(), next.end(), Sampler::kNone) != next.end()) throw std::runtime_error(kNoNumber);
  std::copy(next.begin(), next.end(), chosen);
}

void CpuBatch::keep(int kind, uint16_t* kept) const {
  const size_t hidden = size_t(model_->shape.hidden_size);
  for (size_t text = 0; text < size_t(texts()); ++text)
    for (size_t i = 0; i < hidden; ++i)
      kept[(text * keep_.size() + size_t(kind)) * hidden + i] = float_to_bf16(x_[text * hidden + i]);
}

}  // namespace ppsd
