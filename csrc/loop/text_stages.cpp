#include "text_stages.h"

#include <algorithm>
#include <cstring>

namespace ppsd {

TextStages::TextStages(std::unique_ptr<ModelBackend> passes, const Sampling& sampling)
    : passes_(passes.release()),
      sampling_(sampling),
      drafting_(*passes_->model().kernels, passes_->model().shape.vocab_size, passes_->members()),
      verifying_(*passes_->model().kernels, passes_->model().shape.vocab_size, passes_->members()),
      vocabulary_(passes_->draft_vocabulary()),
      exits_(hidden()) {
  begin(0, 0);
}

void TextStages::begin(int answer, uint64_t key) {
  sampling_.seed = key;
  sampling_.answer = answer;
  drafting_.begin(sampling_);
  verifying_.begin(sampling_);
  vocabulary_ = passes_->draft_vocabulary();
  eagle_ = {};
  exits_.restart(headed_ = 0);
  heard_.reset();
  kept_.clear();
  passes_->reserve(blocks_ ? blocks_->rows() : 0, passes_->model().rotary.matters(answer));
}

void TextStages::reserve(int capacity) {
  if (blocks_ && capacity <= blocks_->rows()) return;
  auto grown = std::make_unique<TextBlocks>(passes_->block_bytes(), capacity);
  if (blocks_) std::memcpy(grown->blocks().at(0), blocks_->blocks().at(0), size_t(blocks_->rows() / kSpan) * passes_->block_bytes());
  passes_->lie_in(&grown->blocks());
  blocks_ = std::move(grown);
  passes_->reserve(blocks_->rows(), passes_->model().rotary.matters(sampling_.answer));
}

std::optional<std::pair<int, double>> TextStages::draft(int start, const std::vector<int>& ids, bool draw) {
  if (heard_ && heard_->position >= start) heard_.reset();   // that row is void
  exits_.cut(start);
  headed_ = std::min(headed_, start);
  vocabulary_.roll_back(start);
  drafting_.know(start, ids.data(), int(ids.size()));
  if (passes_->model().eagle && !ids.empty()) eagle_.know(start, ids.data(), int(ids.size()));
  for (size_t done = 0; done < ids.size(); done += kPassRows) {
    const int rows = int(std::min(size_t(kPassRows), ids.size() - done));
    std::vector<float> x(size_t(rows) * hidden());
    passes_->embed(ids.data() + done, rows, x.data());
    passes_->early({segment(exits_.end(), rows)}, x.data());
    exits_.add(x.data(), rows);
  }
  if (!draw) return std::nullopt;
  vocabulary_.follow(drafting_.ids());
  const int end = exits_.end(), first = passes_->lags() ? std::min(headed_, end - 1) : end - 1;
  std::vector<ModelBackend::Draw> draws{{segment(first, end - first), exits_.at(first), heard_ ? &*heard_ : nullptr,
                                   &drafting_, &vocabulary_, &eagle_, {}, {}}};
  passes_->draw(&draws);
  headed_ = end;
  if (!draws.front().drawn.empty()) exits_.drew(end - 1, std::move(draws.front().drawn));
  return std::make_pair(draws.front().draft.token, draws.front().draft.confidence);
}

std::vector<int> TextStages::verify(int start, const std::vector<int>& ids, int last) {
  const int end = start + int(ids.size()), first = end - last;
  std::vector<int> own;
  std::vector<float> x;
  verifying_.know(start, ids.data(), int(ids.size()));
  for (int done = start; done < end;) {
    const int rows = done < first ? std::min(kPassRows, first - done) : std::min(kPassRows, end - done);
    x.assign(exits_.at(done), exits_.at(done) + size_t(rows) * hidden());
    std::vector<Head::Row> choosing;
    for (int r = 0; done >= first && r < rows; ++r) choosing.push_back({x.data() + size_t(r) * hidden(), &verifying_, done + r + 1});
    const std::vector<int> chosen = passes_->verify({segment(done, rows)}, x.data(), choosing).ids;
    if (std::find(chosen.begin(), chosen.end(), Sampler::kNone) != chosen.end()) throw std::runtime_error(kNoNumber);
    own.insert(own.end(), chosen.begin(), chosen.end());
    if (passes_->model().eagle) {
      if (eagle_.pending() + rows > kPassRows) passes_->read_taps(&eagle_, segment(done, 0).blocks, segment(done, 0).spans);
      eagle_.verified(done, rows, passes_->tapped(0), passes_->tap_width());
    }
    if ((done >= first || kept_width() > hidden()) && passes_->uses_feedback()) keep(done, x.data(), rows);
    done += rows;
  }
  return own;
}

void TextStages::learn(int position) {
  if (!passes_->uses_feedback()) return;
  const auto width = ptrdiff_t(kept_width());
  const auto row = kept_.begin() + width * (position - kept_from_);
  if (kept_width() > hidden()) hear(position + 1);
  heard_ = Feedback{position, {row, row + width}, {}};
  kept_.clear();
}

// The rows from kept_from_ on are verified.
void TextStages::hear(int end) {
  for (int done = kept_from_; done < end; done += kPassRows) {
    const int rows = std::min(kPassRows, end - done);
    std::vector<float> taps;
    for (int row = done; row < done + rows; ++row) {
      const auto tapped = kept_.begin() + ptrdiff_t(kept_width() * size_t(row - kept_from_) + hidden());
      taps.insert(taps.end(), tapped, tapped + ptrdiff_t(hidden()));
    }
    passes_->hear({segment(done, rows)}, exits_.drawn(done, rows).data(), taps.data());
  }
  headed_ = std::max(headed_, end);
}

void TextStages::keep(int start, const float* states, int rows) {
  const int kept = int(kept_.size() / kept_width());
  if (start < kept_from_ || start > kept_from_ + kept) kept_.clear();
  if (kept_.empty()) kept_from_ = start;
  kept_.resize(kept_width() * size_t(start - kept_from_));
  for (int row = 0; row < rows; ++row, states += hidden()) {
    kept_.insert(kept_.end(), states, states + hidden());
    if (kept_width() > hidden()) kept_.insert(kept_.end(), passes_->tapped(row), passes_->tapped(row) + hidden());
  }
}

}  // namespace ppsd
