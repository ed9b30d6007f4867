#include "pass_stage.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace ppsd {

StageTaps::StageTaps(const std::vector<int>& taps, int first, int last) {
  for (const int tap : taps) {
    if (tap > last) continue;
    theirs.push_back(tap > first || first == 0);   // between two stages it is the former's
    if (theirs.back()) own.push_back(tap - first);
  }
}

PassStage::PassStage(const CpuModel& model, int first, int last, Team* team, size_t kv_bytes, const Blocks* loops, size_t begin,
                     const std::vector<int>& taps)
    : model_(model),
      team_(team),
      layers_(*model.kernels, model.shape, model.format, model.kv, pointers(model.layers, first, last), team->size(), begin),
      loops_(loops),
      blocks_(loops != nullptr ? loops->count()   // of a stage with no layers a block has no bytes
                               : int(std::min(kv_bytes / std::max(layers_.end(), size_t(1)), size_t(1) << 24))),
      taps_(taps, first, last) {
  layers_.tap(taps_.own);
  if (last < model.shape.num_layers) return;
  head_ = std::make_unique<Head>(*model.kernels, model.shape, model.head, team->size());
  layers_.followed_by(&model.head.lm_head);
}

uint8_t* PassStage::block(int number) {
  if (number < 0 || number >= blocks_)
    throw std::runtime_error("a pass names block " + std::to_string(number) + "; this stage has " + std::to_string(blocks_));
  if (loops_ != nullptr) return loops_->at(number);
  if (memory_.bytes() == 0) memory_ = Memory(size_t(blocks_) * layers_.end());
  return memory_.as<>() + size_t(number) * layers_.end();
}

void PassStage::change(const PassMessage& pass) {
  for (int number : pass.wiped) std::fill_n(block(number), layers_.end(), uint8_t(0));
  for (const auto& [from, to] : pass.copies) std::copy_n(block(from), layers_.end(), block(to));
  for (int number : pass.closed) answers_.erase(number);
  for (const PassMessage::Opened& begun : pass.opened) {
    const Settings& settings = begun.settings;
    if (int64_t(settings.end) > int64_t(blocks_) * kSpan)
      throw std::runtime_error("an answer is longer than there are blocks for it");
    Answer& opened = answers_[begun.answer] = {settings.end, settings.sampling.logprobs >= 0, head_ ? begun.sampler : nullptr};
    longest_ = std::max(longest_, settings.end);
    if (head_ == nullptr || opened.sampler) continue;
    Sampling sampling = settings.sampling;
    if (settings.grammar != 0) {
      if (!masks_) throw std::runtime_error("this rank knows no grammars");
      sampling.mask = masks_(settings.grammar);
    }
    opened.sampler = std::make_shared<Sampler>(*model_.kernels, model_.shape.vocab_size, team_->size());
    opened.sampler->begin(sampling);
  }
}

PassStage::Answer& PassStage::answer(const PassPart& part) {
  const auto found = answers_.find(part.answer);
  if (found == answers_.end()) throw std::runtime_error("a pass has rows of an answer that has not begun");
  const bool known = found->second.sampler == nullptr || found->second.sampler->known() >= part.known;
  if (part.start + part.rows > found->second.end || !known)
    throw std::runtime_error("a pass has rows that are not of its answer");
  return found->second;
}

const float* PassStage::reserve(int rows) {
  if (rows > capacity_) rope_ = make_rope(model_.rotary, capacity_ = rows);
  return rope_.data();
}

bool PassStage::run(PassMessage* pass, const Cancelled& cancelled, PassVerdict* verdict, const float* rope) {
  change(*pass);
  if (pass->rows() == 0) return true;
  std::vector<std::vector<uint8_t*>> tables;
  std::vector<Segment> segments;
  for (const PassPart& part : pass->parts) {
    if (part.rows == 0) continue;
    Answer& owner = answer(part);
    if (owner.sampler) owner.sampler->know(part.known, part.ids.data(), int(part.ids.size()));
    std::vector<uint8_t*>& table = tables.emplace_back();
    for (int number : part.blocks) table.push_back(block(number));
    segments.push_back({part.rows, part.start, table.data(), int(table.size())});
  }
  if (!layers_.run(*team_, segments, rope != nullptr ? rope : reserve(longest_), pass->hidden.data(), cancelled)) return false;
  add_taps(pass);
  if (head_ != nullptr) choose(*pass, verdict), verdict->tapped = std::move(pass->tapped);
  return true;
}

double PassStage::time(int rows, int context) {
  if (!timed_ || context + rows > timed_->rows()) {
    timed_ = std::make_unique<TextBlocks>(layers_.end(), context + kPassRows);
    timed_->fill();
  }
  const size_t hidden = size_t(model_.shape.hidden_size);
  const float* rope = reserve(context + kPassRows);
  std::vector<float> x;
  for (size_t i = 0; i < size_t(rows) * hidden; ++i) x.push_back(float(i * 37 % 101) / 101.0f - 0.5f);
  Sampler sampler(*model_.kernels, model_.shape.vocab_size, team_->size());
  std::vector<Head::Row> choosing;
  for (int row = 0; row < rows; ++row) choosing.push_back({x.data() + size_t(row) * hidden, &sampler, context + row + 1});
  const auto begin = std::chrono::steady_clock::now();
  layers_.run(*team_, {timed_->segment(context, rows)}, rope, x.data());
  if (head_ != nullptr) head_->choose(*team_, choosing, false);
  return seconds_since(begin);
}

// What its rows are at the taps of these layers, beside those that they have brought along.
void PassStage::add_taps(PassMessage* pass) const {
  const size_t hidden = size_t(model_.shape.hidden_size), rows = size_t(pass->rows());
  const float *before = pass->tapped.data(), *own = layers_.tapped();
  std::vector<float> all;
  all.reserve(rows * taps_.theirs.size() * hidden);
  for (size_t row = 0; row < rows; ++row)
    for (const bool mine : taps_.theirs) {
      const float*& from = mine ? own : before;
      all.insert(all.end(), from, from + hidden);
      from += hidden;
    }
  pass->tapped = std::move(all);
}

void PassStage::choose(const PassMessage& pass, PassVerdict* verdict) {
  const size_t hidden = size_t(model_.shape.hidden_size);
  std::vector<Head::Row> rows;
  const float* x = pass.hidden.data();
  for (const PassPart& part : pass.parts) {
    if (part.rows == 0) continue;
    Sampler* sampler = answer(part).sampler.get();
    for (int r = part.rows - part.chooses; r < part.rows; ++r)
      rows.push_back({x + size_t(r) * hidden, sampler, part.start + r + 1});
    x += size_t(part.rows) * hidden;
  }
  if (rows.empty()) return;
  verdict->chosen = head_->choose(*team_, rows, false);
  if (pass.wants_hidden)
    for (const Head::Row& row : rows) verdict->hidden.insert(verdict->hidden.end(), row.x, row.x + hidden);
  size_t first = 0;
  for (size_t p = 0; p < pass.parts.size(); ++p) {
    const PassPart& part = pass.parts[p];
    if (part.rows == 0) continue;
    const Answer& owner = answer(part);
    const size_t count = size_t(part.chooses);
    const auto begin = verdict->chosen.begin() + ptrdiff_t(first), end = begin + ptrdiff_t(count);
    if (std::find(begin, end, Sampler::kNone) != end) {
      PassVerdict::Failure failure{int32_t(p), 0, kNoNumber};
      try {
        if (const auto why = head_->failure(owner.sampler.get())) std::rethrow_exception(why);
      } catch (const MaskFailed& error) {
        failure = {int32_t(p), 1, error.what()};
      } catch (const std::exception& error) {
        failure.why = error.what();
      }
      verdict->failures.push_back(std::move(failure));
    }
    if (owner.logprobs) {
      verdict->logprobs.resize(verdict->chosen.size());
      std::vector<Logprobs> told = owner.sampler->take_logprobs();
      told.resize(count);
      std::move(told.begin(), told.end(), verdict->logprobs.begin() + ptrdiff_t(first));
    }
    first += count;
  }
}

}  // namespace ppsd
