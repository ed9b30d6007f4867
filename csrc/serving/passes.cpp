#include "passes.h"

#include <algorithm>
#include <cstring>

#include "../cpu/engine.h"

namespace ppsd {
namespace {

const std::vector<int> kWholeVocabulary;

}  // namespace

Passes::Passes(std::shared_ptr<const CpuModel> model, int threads)
    : model_(std::move(model)),
      team_(make_shared_team(threads)),
      early_(*model_->kernels, model_->shape, model_->format, model_->kv, pointers(model_->layers, 0, model_->exit_layer),
             threads),
      exit_(*model_->kernels, model_->shape, model_->format, model_->kv,
            pointers(model_->exit_layers, 0, int(model_->exit_layers.size())), threads, early_.end()),
      eagle_(model_->eagle ? std::make_unique<EagleStack>(*model_->kernels, *model_->eagle, model_->format, model_->kv, threads,
                                                          exit_.end())
                           : nullptr),
      late_(*model_->kernels, model_->shape, model_->format, model_->kv,
            pointers(model_->layers, model_->exit_layer, model_->shape.num_layers), threads,
            eagle_ ? eagle_->end() : exit_.end()),
      feedback_(*model_->kernels, model_->shape, model_->exit_feedback, threads, kPassRows),
      head_(*model_->kernels, model_->shape, model_->head, kWholeVocabulary, threads) {
  if (model_->drafts())
    exit_head_ = std::make_unique<Head>(*model_->kernels, model_->shape, model_->drafting_head(), model_->draft_ids, threads);
  if (eagle_) late_.tap(model_->eagle->taps);
  late_.followed_by(&model_->head.lm_head);
  const size_t floats = size_t(kPassRows) * model_->shape.hidden_size;
  exits_.resize(floats);
  drawn_from_.resize(floats);
  states_.resize(floats);
}

double Passes::draft_share() const {
  size_t early = 0, all = model_->head.lm_head.bytes();
  const auto bytes = [](const PackedLayer& layer) {
    return layer.qkv.bytes() + layer.o.bytes() + (layer.has_mlp() ? layer.gate_up.bytes() + layer.down.bytes() : 0);
  };
  for (int i = 0; i < model_->shape.num_layers; ++i) {
    all += bytes(model_->layers[i]);
    if (i < model_->exit_layer) early += bytes(model_->layers[i]);
  }
  for (const PackedLayer& layer : model_->exit_layers) early += bytes(layer);
  if (model_->eagle) early += model_->eagle->bytes();
  else if (model_->drafts()) early += model_->exit_head.lm_head.bytes();
  return double(early) / double(all);
}

void Passes::reserve(int rows) {
  if (rows <= capacity_) return;
  capacity_ = std::max(rows, 2 * capacity_);
  rope_ = make_rope(model_->rotary, capacity_);
  if (eagle_) eagle_->reserve(capacity_);
}

void Passes::copy(CpuEngine& engine, int rows, uint8_t* const* blocks) {
  size_t offset = 0;   // the stages hold, one after the other, what a block here does
  const auto copy = [&](const OwnBlocks& from) { from.copy_to(blocks, std::exchange(offset, offset + from.bytes()), rows); };
  copy(engine.draft().blocks());
  for (const auto& stage : engine.verify()) copy(stage->blocks());
}

const std::vector<int>& Passes::choose(Head* head, const std::vector<Head::Row>& rows, bool store) {
  head->begin_pass(rows, store);
  team_->run([&](int member) { head->pass(*team_, member); });
  return head->chosen();
}

int Passes::distance(const Draw& draw) const {
  const int away = draw.feedback != nullptr ? draw.position - 1 - draw.feedback->position : 0;
  return away >= 1 && away <= feedback_.most_distance() ? away : 0;
}

void Passes::early(const std::vector<Segment>& segments, float* x, std::vector<Draw>* draws) {
  const size_t hidden = size_t(model_->shape.hidden_size), row_bytes = hidden * sizeof(float);
  if (early_.size() > 0) {
    early_.begin_pass(segments);
    team_->run([&](int member) { early_.pass(*team_, member, rope_.data(), x); });
  }
  std::vector<Draw*> order;   // by distance, so that rows that one matrix is for lie together
  for (Draw& draw : *draws) order.push_back(&draw);
  std::stable_sort(order.begin(), order.end(), [&](const Draw* a, const Draw* b) { return distance(*a) < distance(*b); });
  const auto from = [&](size_t i) { return drawn_from_.data() + i * hidden; };
  for (size_t i = 0; i < order.size(); ++i) std::memcpy(from(i), x + order[i]->row * hidden, row_bytes);
  feed(order);
  if (exit_.size() > 0) {   // every row passes the exit head's own layers, whether it draws or not
    size_t rows = 0;
    for (const Segment& segment : segments) rows += size_t(segment.rows);
    std::memcpy(exits_.data(), x, rows * row_bytes);
    for (size_t i = 0; i < order.size(); ++i) std::memcpy(exits_.data() + order[i]->row * hidden, from(i), row_bytes);
    exit_.begin_pass(segments);
    team_->run([&](int member) { exit_.pass(*team_, member, rope_.data(), exits_.data()); });
    for (size_t i = 0; i < order.size(); ++i) std::memcpy(from(i), exits_.data() + order[i]->row * hidden, row_bytes);
  }
  if (order.empty()) return;
  if (eagle_) {
    std::vector<EagleStack::Work> works;
    for (const Draw* draw : order) works.push_back({draw->text, draw->blocks, draw->spans, draw->position - 1});
    eagle_->advance(*team_, works);
    for (size_t i = 0; i < order.size(); ++i) std::memcpy(from(i), order[i]->text->output(), row_bytes);
  }
  std::vector<Head::Row> rows;
  for (size_t i = 0; i < order.size(); ++i) rows.push_back({from(i), order[i]->sampler, order[i]->position});
  const std::vector<int> chosen = choose(exit_head_.get(), rows, true);
  const int* ids = exit_head_->draft_ids();
  for (size_t i = 0; i < order.size(); ++i) {
    Draft& draft = order[i]->draft;
    draft = {ids ? ids[0] : 0, 0.0};   // of no number: a draft like any other that is wrong
    if (chosen[i] == Sampler::kNone) continue;
    draft.token = chosen[i];
    draft.confidence = order[i]->sampler->confidence(0, draft.token, ids, exit_head_->outputs());
  }
}

// Adds to the rows in drawn_from_ what the heads draw of verified rows; `draws` are in order of their distance.
void Passes::feed(std::vector<Draw*>& draws) {
  const size_t hidden = size_t(model_->shape.hidden_size);
  for (size_t first = 0, last = 0; first < draws.size(); first = last) {
    const int away = distance(*draws[first]);
    for (; last < draws.size() && distance(*draws[last]) == away; ++last)
      if (away > 0)
        std::memcpy(states_.data() + (last - first) * hidden, draws[last]->feedback->hidden.data(), hidden * sizeof(float));
    if (away == 0) continue;
    feedback_.begin_pass(int(last - first));
    team_->run([&](int member) {
      feedback_.pass(*team_, member, states_.data(), away, drawn_from_.data() + first * hidden);
    });
  }
}

void Passes::late(const std::vector<Segment>& segments, float* x) {
  late_.begin_pass(segments);
  team_->run([&](int member) { late_.pass(*team_, member, rope_.data(), x); });
}

}  // namespace ppsd
