#include "stage.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../pipeline/oracle.h"
#include "bounds.h"

namespace ppsd {

static_assert(kSiblings == kSiblingPlaces, "stages keep the siblings that a scheduler may have under way");

std::vector<const PackedLayer*> pointers(const std::vector<PackedLayer>& layers, int first, int last) {
  std::vector<const PackedLayer*> out;
  for (int i = first; i < last; ++i) out.push_back(&layers[i]);
  return out;
}

void embed(const Tensor& table, int id, float* row) {
  const int n = int(table.columns);
  read_row(table, id, row);
  float nothing = 0.0f;   // stays so, as long as all of the row is finite: it has not been packed, and so not looked at
  for (int i = 0; i < n; ++i) nothing += 0.0f * row[i];
  if (nothing != 0.0f)
    throw std::runtime_error("the embedding of token " + std::to_string(id) +
                             " is NaN or infinite: the model's file is damaged, fetch it again");
}

namespace {

// Rows of one sampler; throws what its grammar does.
void begin_choice(Head* head, const std::vector<Head::Row>& rows, bool store) {
  head->begin_pass(rows, store);
  if (const auto failure = head->failure(rows.front().sampler)) std::rethrow_exception(failure);
}

// The positions that the rows of a chunk choose tokens for, from `first` on.
std::vector<int> chosen_by(const Chunk& chunk, int first) {
  std::vector<int> positions;
  for (int row = first; row < chunk.rows(); ++row) positions.push_back(chunk.start + row + 1);
  return positions;
}

}  // namespace

DraftVocabulary CpuModel::draft_vocabulary() const {
  if (draft_ids.empty()) return DraftVocabulary(shape.vocab_size);
  return {*kernels, draft_ids, draft_rows, drafting_head().lm_head.format};
}

// -- draft -------------------------------------------------------------------------------------------------------------

CpuDraftStage::CpuDraftStage(const CpuModel& model, int members)
    : model_(model),
      early_(*model.kernels, model.shape, model.format, model.kv, pointers(model.layers, 0, model.exit_layer), members),
      late_(*model.kernels, model.shape, model.format, model.kv,
            pointers(model.exit_layers, 0, int(model.exit_layers.size())), members, early_.end()),
      eagle_(model.eagle ? std::make_unique<CpuEagleStack>(*model.kernels, *model.eagle, model.format, model.kv, members, late_.end())
                         : nullptr),
      blocks_(eagle_ ? eagle_->end() : late_.end()),
      feedback_(*model.kernels, model.shape, model.exit_feedback, members),
      vocabulary_(model.draft_vocabulary()),
      sampler_(*model.kernels, model.shape.vocab_size, members),
      x_(size_t(kPassRows) * model.shape.hidden_size) {
  if (model.drafts())
    head_ = std::make_unique<Head>(*model.kernels, model.shape, model.drafting_head(), members);
  late_.followed_by(&model.exit_head.lm_head);
  early_.followed_by(model.exit_layers.empty() ? &model.exit_head.lm_head : &model.exit_layers.front().qkv);
}

void CpuDraftStage::reserve(int capacity, const float* rope) {
  rope_ = rope;
  most_ = capacity;
  if (eagle_) eagle_->reserve(capacity);
  const size_t bytes = size_t(capacity) * model_.shape.hidden_size * 4;
  if (bytes <= exit_hidden_.bytes()) return;
  Memory grown(bytes);
  if (exit_hidden_.bytes() > 0) std::memcpy(grown.as<>(), exit_hidden_.as<>(), exit_hidden_.bytes());
  exit_hidden_ = std::move(grown);
}

void CpuDraftStage::begin(const Sampling& sampling, int kept) {
  length_ = std::min(length_, kept);
  head_length_ = std::min(head_length_, length_);
  Sampling drawing = sampling;
  drawing.logprobs = -1;   // of drafts nobody asks
  drawing.mask = drawing.draft_mask;
  sampler_.begin(drawing, length_);
  vocabulary_ = model_.draft_vocabulary();
}

bool CpuDraftStage::step(const DraftStep& step, Draft* draft, const Cancelled& cancelled) {
  length_ = std::min(length_, step.start);
  head_length_ = std::min(head_length_, length_);
  const int count = int(step.ids.size());
  check_bound((size_t(step.start) + count) * model_.shape.hidden_size * 4, exit_hidden_.bytes(), "bytes of exit states");
  sampler_.know(step.start, step.ids.data(), count);
  if (eagle_ && count > 0) text_.know(step.start, step.ids.data(), count);
  for (int done = 0; done < count; done += kPassRows)
    if (!run_rows(step.ids.data() + done, std::min(kPassRows, count - done), cancelled)) return false;
  return draft == nullptr || draw(step, draft, cancelled);
}

// Through the early layers.
bool CpuDraftStage::run_rows(const int* ids, int rows, const Cancelled& cancelled) {
  const int start = length_;
  const size_t hidden = size_t(model_.shape.hidden_size);
  blocks_.hold(start + rows, most_);
  early_.begin_pass({segment(start, rows)});
  for (int r = 0; r < rows; ++r) embed(model_.embedding, ids[r], x_.data() + size_t(r) * hidden);
  bool done = true;
  if (early_.size() > 0)
    team_->run([&](int member) {
      if (!early_.pass(*team_, member, rope_, x_.data(), cancelled) && member == 0) done = false;
    });
  if (!done) return false;
  std::memcpy(exit_hidden_.as<float>() + size_t(start) * hidden, x_.data(), size_t(rows) * hidden * 4);
  length_ = start + rows;
  return true;
}

// The exit head on the last row.
bool CpuDraftStage::draw(const DraftStep& step, Draft* draft, const Cancelled& cancelled) {
  if (eagle_) {
    eagle_->advance({{&text_, blocks_.pointers(), blocks_.size(), length_ - 1}});
    begin_choice(head_.get(), {{text_.output(), &sampler_, length_, &vocabulary_}}, true);
    team_->run([&](int member) { head_->pass(*team_, member); });
    choose(draft);
    return true;
  }
  const int hidden = model_.shape.hidden_size;
  const Feedback* feedback = step.feedback.get();
  const float* exits = exit_hidden_.as<float>();
  // The exit head's own layers first catch up with the rows that came since it was last asked. The row that is drawn
  // from also receives what became of the newest row that has passed all layers, if that is near.
  const int distance = feedback != nullptr ? length_ - 1 - feedback->position : 0;
  const bool heard = distance >= 1 && distance <= feedback_.most_distance();
  head_length_ = std::min(head_length_, length_ - 1);
  bool done = true;
  while (head_length_ < length_) {
    const int behind = std::min(kPassRows, length_ - head_length_), first = head_length_;
    const bool last = first + behind == length_;
    std::memcpy(x_.data(), exits + size_t(first) * hidden, size_t(behind) * hidden * 4);
    late_.begin_pass({segment(first, behind)});
    feedback_.begin_pass();
    float* newest = x_.data() + size_t(behind - 1) * hidden;
    if (last) begin_choice(head_.get(), {{newest, &sampler_, length_, &vocabulary_}}, true);
    team_->run([&](int member) {
      if (last && heard) feedback_.pass(*team_, member, feedback->hidden.data(), distance, newest);
      if (!late_.pass(*team_, member, rope_, x_.data(), cancelled)) {
        if (member == 0) done = false;
      } else if (last) {
        head_->pass(*team_, member);
      }
    });
    if (!done) return false;
    head_length_ += behind;
  }
  choose(draft);
  return true;
}

// From the logits for position length_: a draft token.
void CpuDraftStage::choose(Draft* draft) {
  draft->token = head_->chosen().front();
  if (draft->token == Sampler::kNone) {   // of no number: a draft like any other that is wrong
    *draft = {vocabulary_.ids() ? vocabulary_.ids()[0] : 0, 0.0};
    return;
  }
  draft->confidence = sampler_.confidence(0, draft->token, vocabulary_);
}

Draft foreseen(const Oracle& oracle, Draft draft, int position, int vocab_size) {
  if (position >= int(oracle.truth.size())) return draft;
  return feigned(oracle.truth[position], vocab_size, oracle.acceptance, oracle.second, oracle.seed, position);
}

void CpuDraftStage::export_hidden(Chunk* chunk) {
  const size_t hidden = size_t(model_.shape.hidden_size);
  const float* from = exit_hidden_.as<float>() + size_t(chunk->start) * hidden;
  chunk->hidden.assign(from, from + hidden * chunk->rows());
}

// -- verify ------------------------------------------------------------------------------------------------------------

CpuVerifyStage::CpuVerifyStage(const CpuModel& model, int first, int last, int members)
    : model_(model),
      layers_(*model.kernels, model.shape, model.format, model.kv, pointers(model.layers, first, last), members),
      blocks_(layers_.end()) {
  if (last == model.shape.num_layers) {
    head_ = std::make_unique<Head>(*model.kernels, model.shape, model.head, members);
    layers_.followed_by(&model.head.lm_head);
    sampler_ = std::make_unique<Sampler>(*model.kernels, model.shape.vocab_size, members);
  }
}

void CpuVerifyStage::tell(CpuDraftStage* draft) {
  told_ = draft;
  layers_.tap(model_.eagle->taps);
}

void CpuVerifyStage::reserve(int capacity, const float* rope) {
  rope_ = rope;
  most_ = capacity;
}

void CpuVerifyStage::begin(const Sampling& sampling, int kept) {
  length_ = std::min(length_, kept);
  if (sampler_) sampler_->begin(sampling, length_);
}

bool CpuVerifyStage::run(Chunk* chunk, const Cancelled& cancelled) {
  const size_t hidden = size_t(model_.shape.hidden_size);
  length_ = std::min(length_, chunk->start);
  if (sampler_) sampler_->know(chunk->start, chunk->ids.data(), chunk->rows());
  check_bound(size_t(chunk->rows()) * hidden, chunk->hidden.size(), "floats of hidden states");
  for (int done = 0; done < chunk->rows(); done += kPassRows) {
    const int rows = std::min(kPassRows, chunk->rows() - done);
    float* x = chunk->hidden.data() + size_t(done) * hidden;
    blocks_.hold(length_ + rows, most_);
    layers_.begin_pass({{rows, length_, blocks_.pointers(), blocks_.size()}});
    bool finished = true;
    team_->run([&](int member) {
      if (!layers_.pass(*team_, member, rope_, x, cancelled) && member == 0) finished = false;
    });
    if (!finished) return false;
    if (told_ != nullptr) {
      EagleText* told = told_->text();
      if (told->pending() + rows > kPassRows) told_->catch_up();
      told->verified(length_, rows, layers_.tapped(), model_.eagle->tap_width());
    }
    length_ += rows;
  }
  return true;
}

std::vector<int> CpuVerifyStage::choose(const Chunk& chunk, int last) {
  const int first = chunk.rows() - last;
  return choose_rows(chunk.hidden.data() + size_t(first) * model_.shape.hidden_size, chosen_by(chunk, first), false);
}

std::vector<int> CpuVerifyStage::choose_rows(const float* x, const std::vector<int>& positions, bool store) {
  std::vector<Head::Row> rows;
  for (size_t r = 0; r < positions.size(); ++r) rows.push_back({x + r * size_t(model_.shape.hidden_size), sampler_.get(), positions[r]});
  begin_choice(head_.get(), rows, store);
  team_->run([&](int member) { head_->pass(*team_, member); });
  const std::vector<int>& chosen = head_->chosen();
  if (std::find(chosen.begin(), chosen.end(), Sampler::kNone) != chosen.end())
    throw std::runtime_error(kNoNumber);
  return chosen;
}

const float* CpuVerifyStage::logits(const Chunk& chunk) {
  choose_rows(chunk.hidden.data(), chosen_by(chunk, 0), true);
  return sampler_->logits(0, model_.shape.vocab_size);
}

}  // namespace ppsd
