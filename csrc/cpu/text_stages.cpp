#include "text_stages.h"

#include <algorithm>

namespace ppsd {

TextStages::TextStages(std::shared_ptr<const CpuModel> model, int threads, const Sampling& sampling)
    : model_(std::move(model)), sampling_(sampling), engine_(new CpuEngine(model_, threads), NotAfterFork()) {
  begin(0, 0);
  engine_->draft().follow_text();
  engine_->use_shared_team();
}

void TextStages::begin(int answer, uint64_t key) {
  sampling_.seed = key;
  sampling_.answer = answer;
  engine_->begin(sampling_, 0, 0, answer);
}

void TextStages::reserve(int capacity) { engine_->reserve(capacity); }

std::optional<std::pair<int, double>> TextStages::draft(int start, std::vector<int> ids, bool draw) {
  if (heard_ && heard_->position >= start) heard_.reset();   // that row is void
  DraftStep step;
  step.start = start;
  step.ids = std::move(ids);
  step.draw = draw;
  step.feedback = heard_;
  Draft draft;
  engine_->draft().step(step, draw ? &draft : nullptr, nullptr);
  if (!draw) return std::nullopt;
  return std::make_pair(draft.token, draft.confidence);
}

std::vector<int> TextStages::verify(int start, const std::vector<int>& ids, int last) {
  const int end = start + int(ids.size()), first = end - last;
  std::vector<int> own;
  for (int done = start; done < end;) {
    const int rows = done < first ? first - done : std::min(kPassRows, end - done);
    Chunk chunk;
    chunk.start = done;
    chunk.ids.assign(ids.begin() + (done - start), ids.begin() + (done - start) + rows);
    engine_->draft().export_hidden(&chunk);
    engine_->verify().run(&chunk, nullptr);
    if (done >= first) {
      const std::vector<int> chosen = engine_->verify().choose(chunk, rows);
      own.insert(own.end(), chosen.begin(), chosen.end());
      keep(chunk);
    }
    done += rows;
  }
  return own;
}

void TextStages::learn(int position) {
  if (!hears()) return;
  const size_t hidden = size_t(model_->shape.hidden_size);
  const auto row = kept_.begin() + hidden * size_t(position - kept_from_);
  heard_ = std::make_shared<Feedback>(Feedback{position, {row, row + hidden}});
  kept_.clear();
}

void TextStages::keep(const Chunk& chunk) {
  if (!hears()) return;
  const size_t hidden = size_t(model_->shape.hidden_size);
  const int kept = int(kept_.size() / hidden);
  if (chunk.start < kept_from_ || chunk.start > kept_from_ + kept) kept_.clear();
  if (kept_.empty()) kept_from_ = chunk.start;
  kept_.resize(hidden * size_t(chunk.start - kept_from_));
  kept_.insert(kept_.end(), chunk.hidden.begin(), chunk.hidden.end());
}

}  // namespace ppsd
