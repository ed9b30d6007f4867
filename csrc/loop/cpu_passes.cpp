#include "cpu_passes.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "../cpu/half.h"

namespace ppsd {
namespace {

ModelShape without_queries(ModelShape shape) {
  shape.num_heads = 0;
  return shape;
}

}  // namespace

CpuPasses::Drafting::Drafting(const CpuModel& model, int members)
    : early(*model.kernels, model.shape, model.format, model.kv, pointers(model.layers, 0, model.exit_layer), members),
      exit(*model.kernels, model.shape, model.format, model.kv, pointers(model.exit_layers, 0, int(model.exit_layers.size())), members,
           early.end()),
      feedback(*model.kernels, model.shape, model.exit_feedback, model.tap, members),
      head(model.drafts() ? std::make_unique<Head>(*model.kernels, model.shape, model.drafting_head(), members) : nullptr) {
  exit.followed_by(&model.drafting_head().lm_head);
  early.followed_by(exit.size() > 0 ? &model.exit_layers.front().qkv : &model.drafting_head().lm_head);
  if (model.tap.layer == 0) return;
  exit.tap({0});
  wide.resize(size_t(kPassRows) * 2 * size_t(model.shape.hidden_size));
  keys = std::make_unique<LayerStack>(*model.kernels, without_queries(model.shape), model.format, model.kv,
                                      std::vector<const PackedLayer*>{&model.tap.keys}, members, exit.begin());
  keys->read_wide(wide.data());
}

CpuPasses::CpuPasses(std::shared_ptr<const CpuModel> model, std::unique_ptr<Team> team, const std::vector<int>& keep, bool late)
    : ModelBackend(std::move(model), std::move(team)),
      drafting_(std::make_unique<Drafting>(*model_, members())),
      eagle_(model_->eagle ? std::make_unique<CpuEagleStack>(*model_->kernels, *model_->eagle, model_->format, model_->kv,
                                                          members(), drafting_->exit.end())
                           : nullptr),
      late_(*model_->kernels, model_->shape, model_->format, model_->kv,
            pointers(model_->layers, model_->exit_layer, late ? model_->shape.num_layers : model_->exit_layer), members(),
            eagle_ ? eagle_->end() : drafting_->exit.end()),
      kept_width_(keep.size() * size_t(model_->shape.hidden_size)) {
  use(nullptr);
  if (!keep.empty() && drafting_->early.size() > 0) throw std::runtime_error("hidden states are kept without an exit head");
  if (late) {
    std::vector<int> taps = model_->taps().empty() ? keep : model_->taps();
    for (int& tap : taps) tap -= model_->exit_layer;
    late_.tap(std::move(taps));
    head_ = std::make_unique<Head>(*model_->kernels, model_->shape, model_->head, members());
    late_.followed_by(&model_->head.lm_head);
  }
  const size_t floats = size_t(kPassRows) * model_->shape.hidden_size;
  exits_.resize(floats);
  drawn_from_.resize(floats);
  states_.resize(floats);
}

void CpuPasses::draft_with(std::shared_ptr<const CpuModel> model) {
  if (head_ || eagle_) throw std::logic_error("the late layers here are of the model before");
  auto drafting = std::make_unique<Drafting>(*model, members());
  if (drafting->exit.end() != drafting_->exit.end() || model->tap.layer != model_->tap.layer) throw std::runtime_error("this exit head has other sizes");
  drafting_ = std::move(drafting);
  model_ = std::move(model);
}

double CpuPasses::draft_share() const {
  size_t early = 0, late = (head_ ? model_->head : model_->drafting_head()).lm_head.bytes();   // over ranks a guess
  const auto bytes = [](const PackedLayer& layer) {
    return layer.qkv.bytes() + layer.o.bytes() + (layer.has_mlp() ? layer.gate_up.bytes() + layer.down.bytes() : 0);
  };
  for (int i = 0; i < model_->exit_layer; ++i) early += bytes(model_->layers[i]);
  for (int i = model_->exit_layer; head_ && i < model_->shape.num_layers; ++i) late += bytes(model_->layers[i]);
  if (!head_) {
    const std::vector<PackedLayer>& own = model_->eagle ? model_->eagle->layers : model_->exit_layers;
    const size_t one = model_->exit_layer > 0 ? early / size_t(model_->exit_layer) : own.empty() ? 0 : bytes(own.front());
    late += one * size_t(model_->shape.num_layers - model_->exit_layer);
  }
  const size_t all = early + late;
  for (const PackedLayer& layer : model_->exit_layers) early += bytes(layer);
  if (model_->eagle) early += model_->eagle->bytes();
  else if (model_->drafts()) early += model_->exit_head.lm_head.bytes();
  return double(early) / double(std::max(all, size_t(1)));
}

void CpuPasses::reserve(int rows, int rotated_as) {
  if (rows <= capacity_ && rotated_as == rotated_as_) return;
  if (rows > capacity_) capacity_ = std::max(rows, 2 * capacity_);
  rope_ = make_rope(model_->rotary, capacity_, rotated_as_ = rotated_as);
  if (eagle_) eagle_->reserve(capacity_);
}

void CpuPasses::embed(const int* ids, int rows, float* x) {
  for (int r = 0; r < rows; ++r, x += model_->shape.hidden_size) ppsd::embed(model_->embedding, ids[r], x);
}

// -- drafts ------------------------------------------------------------------------------------------------------------

bool CpuPasses::early(const std::vector<Segment>& segments, float* x, const Cancelled& cancelled) {
  return drafting_->early.size() == 0 || drafting_->early.run(*team_, segments, rope_.data(), x, cancelled);
}

int CpuPasses::distance(const Draw& draw) const {
  const int away = draw.feedback != nullptr ? draw.position() - 1 - draw.feedback->position : 0;
  return away >= 1 && away <= drafting_->feedback.most_distance() ? away : 0;
}

bool CpuPasses::pass_exit(const std::vector<Segment>& segments, const Cancelled& cancelled) {
  return drafting_->exit.run(*team_, segments, rope_.data(), exits_.data(), cancelled);
}

void CpuPasses::prefill_head(const Segment& rows, const float* states) {
  const size_t hidden = size_t(model_->shape.hidden_size);
  for (int done = 0; done < rows.rows; done += kPassRows) {
    const int count = std::min(kPassRows, rows.rows - done);
    std::memcpy(exits_.data(), states + size_t(done) * hidden, size_t(count) * hidden * sizeof(float));
    pass_exit({{count, rows.start + done, rows.blocks, rows.spans}}, nullptr);
  }
}

bool CpuPasses::draw(std::vector<Draw>* draws, const Cancelled& cancelled) {
  const size_t hidden = size_t(model_->shape.hidden_size);
  int rows = 0;
  for (const Draw& draw : *draws) rows += draw.rows.rows;
  const auto leave_last = [&](Draw& draw, int count) {   // and run `count` rows before it
    if (lags()) prefill_head({count, draw.rows.start, draw.rows.blocks, draw.rows.spans}, draw.states);
    draw.states += size_t(count) * hidden;
    draw.rows.start += count;
    draw.rows.rows -= count;
    rows -= count;
  };
  for (Draw& draw : *draws)
    if (draw.rows.rows > 1 && (!lags() || rows > kPassRows)) leave_last(draw, draw.rows.rows - 1);

  std::vector<Draw*> order;   // by distance, so that rows that one matrix is for lie together
  for (Draw& draw : *draws) order.push_back(&draw);
  std::stable_sort(order.begin(), order.end(), [&](const Draw* a, const Draw* b) { return distance(*a) < distance(*b); });
  if (drafting_->keys) hear_feedback(order);
  const bool alike = distance(*order.front()) == distance(*order.back());
  const bool together = order.size() == 1 || rows == int(order.size());
  const bool done = eagle_              ? draw_by_eagle(order)
                    : alike && together ? draw_at_once(order, cancelled)
                                        : draw_in_parts(order, cancelled);
  if (!done) return false;
  const float* drawn = drafting_->exit.tapped();
  for (Draw* draw : order) {
    if (!drafting_->keys) break;
    drawn += size_t(draw->rows.rows) * hidden;
    draw->drawn.assign(drawn - hidden, drawn);
  }
  const std::vector<int> chosen = drafting_->head->chosen();
  for (size_t i = 0; i < order.size(); ++i) take(order[i], chosen[i]);
  return true;
}

// The last rows lie together, and one matrix is for all of them: feedback, layers and head in one go.
bool CpuPasses::draw_at_once(const std::vector<Draw*>& draws, const Cancelled& cancelled) {
  const size_t hidden = size_t(model_->shape.hidden_size), row_bytes = hidden * sizeof(float);
  const int away = distance(*draws.front());
  std::vector<Segment> segments;
  std::vector<Head::Row> rows;
  float* x = exits_.data();
  for (size_t i = 0; i < draws.size(); ++i) {
    const Draw& draw = *draws[i];
    std::memcpy(x, draw.states, size_t(draw.rows.rows) * row_bytes);
    x += size_t(draw.rows.rows) * hidden;
    if (away > 0) std::memcpy(states_.data() + i * hidden, heard(draw), row_bytes);
    segments.push_back(draw.rows);
    rows.push_back({x - hidden, draw.sampler, draw.position(), draw.vocabulary});
  }
  float* last = x - draws.size() * hidden;
  drafting_->exit.begin_pass(segments);
  drafting_->feedback.begin_pass(int(draws.size()));
  drafting_->head->begin_pass(rows, true);
  bool done = true;
  team_->run([&](int member) {
    if (away > 0) drafting_->feedback.pass(*team_, member, states_.data(), away, last);
    if (drafting_->exit.pass(*team_, member, rope_.data(), exits_.data(), cancelled)) drafting_->head->pass(*team_, member);
    else if (member == 0) done = false;
  });
  return done;
}

bool CpuPasses::draw_in_parts(const std::vector<Draw*>& draws, const Cancelled& cancelled) {
  const size_t hidden = size_t(model_->shape.hidden_size), row_bytes = hidden * sizeof(float);
  const auto from = [&](size_t i) { return drawn_from_.data() + i * hidden; };
  for (size_t i = 0; i < draws.size(); ++i)
    std::memcpy(from(i), draws[i]->states + size_t(draws[i]->rows.rows - 1) * hidden, row_bytes);
  for (size_t first = 0, last = 0; first < draws.size(); first = last) {   // what the heads draw of verified rows
    const int away = distance(*draws[first]);
    for (; last < draws.size() && distance(*draws[last]) == away; ++last)
      if (away > 0) std::memcpy(states_.data() + (last - first) * hidden, heard(*draws[last]), row_bytes);
    if (away == 0) continue;
    drafting_->feedback.begin_pass(int(last - first));
    team_->run([&](int member) { drafting_->feedback.pass(*team_, member, states_.data(), away, from(first)); });
  }
  if (lags()) {
    std::vector<Segment> segments;
    float* x = exits_.data();
    for (size_t i = 0; i < draws.size(); ++i) {
      const size_t rows = size_t(draws[i]->rows.rows);
      std::memcpy(x, draws[i]->states, rows * row_bytes);
      x += rows * hidden;
      std::memcpy(x - hidden, from(i), row_bytes);
      segments.push_back(draws[i]->rows);
    }
    if (!pass_exit(segments, cancelled)) return false;
    x = exits_.data();
    for (size_t i = 0; i < draws.size(); ++i) {
      x += size_t(draws[i]->rows.rows) * hidden;
      std::memcpy(from(i), x - hidden, row_bytes);
    }
  }
  ask_head(draws);
  return true;
}

// Once for a verified row, however many drafts hear of it.
void CpuPasses::hear_feedback(const std::vector<Draw*>& draws) {
  std::vector<const Draw*> wanted;
  std::vector<const float*> states;
  for (const Draw* draw : draws)
    if (distance(*draw) > 0 && draw->feedback->heard.empty()) wanted.push_back(draw), states.push_back(draw->feedback->hidden.data());
  if (wanted.empty()) return;
  const std::vector<float> all = drafting_->feedback.hear(*team_, states);
  const auto hidden = ptrdiff_t(model_->shape.hidden_size);
  for (size_t i = 0; i < wanted.size(); ++i)
    wanted[i]->feedback->heard.assign(all.begin() + ptrdiff_t(i) * hidden, all.begin() + ptrdiff_t(i + 1) * hidden);
}

void CpuPasses::hear(const std::vector<Segment>& segments, const float* states, const float* taps) {
  const size_t hidden = size_t(model_->shape.hidden_size);
  const float eps = model_->shape.rms_norm_eps;
  size_t row = 0;
  for (const Segment& segment : segments)
    for (const size_t end = row + size_t(segment.rows); row < end; ++row) {
      check_bound(row + 1, size_t(kPassRows), "rows");
      float* wide = drafting_->wide.data() + 2 * row * hidden;
      normalize(states + row * hidden, model_->tap.keys.input_norm, eps, wide);
      normalize(taps + row * hidden, model_->tap, eps, wide + hidden);
    }
  drafting_->keys->run(*team_, segments, rope_.data(), drafting_->wide.data());
}

bool CpuPasses::draw_by_eagle(const std::vector<Draw*>& draws) {
  const size_t hidden = size_t(model_->shape.hidden_size);
  std::vector<EagleStack::Work> works;
  for (const Draw* draw : draws) works.push_back({draw->text, draw->rows.blocks, draw->rows.spans, draw->position() - 1});
  eagle_->advance(works);
  for (size_t i = 0; i < draws.size(); ++i)
    std::memcpy(drawn_from_.data() + i * hidden, draws[i]->text->output(), hidden * sizeof(float));
  ask_head(draws);
  return true;
}

// On the rows in drawn_from_.
void CpuPasses::ask_head(const std::vector<Draw*>& draws) {
  std::vector<Head::Row> rows;
  const float* x = drawn_from_.data();
  for (const Draw* draw : draws) rows.push_back({x, draw->sampler, draw->position(), draw->vocabulary}), x += model_->shape.hidden_size;
  drafting_->head->choose(*team_, rows, true);
}

void ModelBackend::take(Draw* draw, int chosen) {
  const DraftVocabulary& ids = *draw->vocabulary;
  Draft& draft = draw->draft;
  draft = {ids.ids() ? ids.ids()[0] : 0, 0.0};   // all logits NaN, or nothing allowed: any id, which verification rejects
  if (chosen == Sampler::kNone) return;
  draft.token = chosen;
  draft.confidence = draw->sampler->confidence(0, chosen, ids);
}

// -- verification ------------------------------------------------------------------------------------------------------

namespace {

using Clock = std::chrono::steady_clock;

// Does the head find these rows where the layers leave them, so that it can follow in the same go?
bool in_place(const std::vector<Head::Row>& rows, size_t hidden) {
  if (rows.empty()) return false;
  const bool alike = rows.front().sampler->alike(rows.front().position).has_value();
  for (size_t r = 1; r < rows.size(); ++r) {
    if (rows[r].x != rows.front().x + r * hidden || rows[r].sampler->alike(rows[r].position).has_value() != alike) return false;
    if (!alike && rows[r].sampler != rows.front().sampler) return false;
  }
  return true;
}

double seconds(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

}  // namespace

ModelBackend::Chosen CpuPasses::verify(const std::vector<Segment>& segments, float* x, const std::vector<Head::Row>& rows,
                                 const Cancelled& cancelled) {
  Chosen out;
  const bool at_once = in_place(rows, size_t(model_->shape.hidden_size));
  late_.begin_pass(segments);
  if (at_once) head_->begin_pass(rows, false);
  const Clock::time_point begun = Clock::now();
  Clock::time_point chosen_from;
  team_->run([&](int member) {
    if (!late_.pass(*team_, member, rope_.data(), x, cancelled)) {
      if (member == 0) out.done = false;
      return;
    }
    if (member == 0) chosen_from = Clock::now();
    if (at_once) head_->pass(*team_, member);
  });
  if (!out.done) return out;
  if (kept_width_ > 0) keep_tapped(segments);
  if (at_once) {
    out.ids = head_->chosen();
  } else if (!rows.empty()) {
    chosen_from = Clock::now();
    out.ids = head_->choose(*team_, rows, false);
  }
  out.late = seconds(begun, chosen_from);
  out.choose = seconds(chosen_from, Clock::now());
  return out;
}

uint16_t* CpuPasses::kept_at(uint8_t* const* blocks, int row) const {
  return reinterpret_cast<uint16_t*>(blocks[row / kSpan] + late_.end()) + size_t(row % kSpan) * kept_width_;
}

void CpuPasses::keep_tapped(const std::vector<Segment>& segments) {
  const float* from = late_.tapped();
  for (const Segment& segment : segments)
    for (int row = segment.start; row < segment.start + segment.rows; ++row, from += kept_width_)
      std::transform(from, from + kept_width_, kept_at(segment.blocks, row), float_to_bf16);
}

std::vector<uint16_t> CpuPasses::kept(uint8_t* const* blocks, int rows) const {
  std::vector<uint16_t> all(size_t(rows) * kept_width_);
  for (int row = 0; row < rows; ++row)
    std::copy_n(kept_at(blocks, row), kept_width_, all.data() + size_t(row) * kept_width_);
  return all;
}

}  // namespace ppsd
