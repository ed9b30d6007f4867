#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace ppsd {

void keep_best(std::vector<Candidate>* top, int most, const Candidate& candidate) {
  if (int(top->size()) < most) {
    top->push_back(candidate);
  } else if (candidate < top->front()) {
    std::pop_heap(top->begin(), top->end());
    top->back() = candidate;
  } else {
    return;
  }
  std::push_heap(top->begin(), top->end());
}

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int kNever = std::numeric_limits<int>::max();
static_assert(Sampler::kNone == kNever);

Sampler::Sampler(const Kernels& kernels, int vocab_size, int members)
    : kernels_(kernels), first_seen_(vocab_size, kNever), scratch_(members) {}

void Sampler::begin(const Sampling& sampling) {
  sampling_ = sampling;
  sampling_.top_k = std::min(sampling.top_k, int(first_seen_.size()));
  std::fill(first_seen_.begin(), first_seen_.end(), kNever);
  ids_.clear();
  told_ = 0;
}

void Sampler::know(int start, const int* ids, int count) {
  for (; int(ids_.size()) > start; ids_.pop_back())
    if (first_seen_[ids_.back()] == int(ids_.size()) - 1) first_seen_[ids_.back()] = kNever;
  for (int i = 0; i < count; ++i) {
    if (ids[i] < 0 || size_t(ids[i]) >= first_seen_.size())   // over ranks, ids come from another process
      throw std::runtime_error("a token id is outside the vocabulary: " + std::to_string(ids[i]));
    if (first_seen_[ids[i]] == kNever) first_seen_[ids[i]] = int(ids_.size());
    ids_.push_back(ids[i]);
  }
  told_ = std::clamp(start - sampling_.answer, 0, told_);
}

void Sampler::begin_rows(std::vector<int> positions, int outputs, bool store) {
  positions_ = std::move(positions);
  const size_t rows = positions_.size();
  const bool filters_all = sampling_.top_p < 1.0f || sampling_.min_p > 0.0f;
  const bool bans = std::any_of(positions_.begin(), positions_.end(), [&](int p) { return sampling_.bans_stops(p); });
  const bool edits = sampling_.counted() || !sampling_.logit_bias.empty() || sampling_.mask || bans;
  logprobs_.assign(sampling_.logprobs >= 0 ? rows : 0, {});
  if (store || edits || !logprobs_.empty()) choice_ = Choice::kStore;
  else if (sampling_.temperature == 0.0f) choice_ = Choice::kBest;
  else if (sampling_.top_k > 0) choice_ = Choice::kTop;
  else choice_ = filters_all ? Choice::kStore : Choice::kBest;
  if (choice_ == Choice::kStore && logits_.size() < rows * outputs) logits_.resize(rows * outputs);
  if (sampling_.mask) ask_mask();
  for (Scratch& scratch : scratch_) {
    scratch.best.assign(rows, kNoCandidate);
    scratch.strange.assign(rows, 0);
    if (choice_ == Choice::kTop) {
      scratch.top.resize(std::max(scratch.top.size(), rows));
      for (auto& top : scratch.top) {
        top.clear();
        top.reserve(sampling_.top_k);
      }
    }
  }
}

// The rows choose for the last positions of what is known, and for the one after it.
void Sampler::ask_mask() {
  const int rows = int(positions_.size());
  if (positions_.back() != known() || positions_.front() != known() - rows + 1)
    throw std::logic_error("with a grammar, rows are those at the end of the text");
  allowed_.assign(size_t(rows) * TokenMask::words(int(first_seen_.size())), 0);
  const auto answer = ids_.begin() + sampling_.answer;
  sampling_.mask->fill(told_, {answer + told_, ids_.end()}, rows, allowed_.data());
  told_ = int(ids_.end() - answer);
}

// Bias, mask and stop ids that come too early, in the stored logits.
void Sampler::edit(int r, const DraftVocabulary& ids) {
  float* scores = logits_.data() + size_t(r) * size_t(ids.size());
  for (const auto& [id, bias] : sampling_.logit_bias)
    if (const int index = ids.index_of(id); index >= 0) scores[index] += bias;
  if (sampling_.bans_stops(positions_[size_t(r)]))
    for (const int id : sampling_.stop_ids)
      if (const int index = ids.index_of(id); index >= 0) scores[index] = kLowest;
  if (!sampling_.mask) return;
  const uint32_t* allowed = allowed_.data() + size_t(r) * TokenMask::words(int(first_seen_.size()));
  for (int i = 0; i < ids.size(); ++i) {
    const int id = ids.ids() ? ids.ids()[i] : i;
    if ((allowed[id / 32] >> (id % 32) & 1) == 0) scores[i] = kLowest;
  }
}

std::optional<RowChoice> Sampler::alike(int position) const {
  const bool filters = sampling_.top_k > 0 || sampling_.top_p < 1.0f || sampling_.min_p > 0.0f;
  const bool edits = sampling_.looks_back() || !sampling_.logit_bias.empty() || sampling_.logprobs >= 0 ||
                     sampling_.bans_stops(position);
  if (edits || (filters && sampling_.temperature > 0.0f)) return std::nullopt;
  return RowChoice{sampling_.temperature > 0.0f ? 1.0f / sampling_.temperature : 0.0f, sampling_.seed};
}

LogitsPhase Sampler::phase(int member, const DraftVocabulary& ids) const {
  LogitsPhase phase{};
  phase.rows = int(positions_.size());
  phase.positions = positions_.data();
  phase.choice = choice_;
  phase.draft_ids = ids.ids();
  // Stored logits are penalised when the token is chosen: confidence wants them as they are.
  phase.repetition_penalty = sampling_.repetition_penalty;
  phase.first_seen = sampling_.penalised() && choice_ != Choice::kStore ? first_seen_.data() : nullptr;
  phase.inverse_temperature = sampling_.temperature > 0.0f ? 1.0f / sampling_.temperature : 0.0f;
  phase.seed = sampling_.seed;
  phase.top_k = std::min(sampling_.top_k, ids.size());
  phase.best = const_cast<Candidate*>(scratch_[member].best.data());
  phase.top = const_cast<std::vector<Candidate>*>(scratch_[member].top.data());
  phase.logits = logits_.data();
  phase.stride = ids.size();
  phase.strange = const_cast<uint8_t*>(scratch_[member].strange.data());
  return phase;
}

void Sampler::give(int r, const float* logits, int outputs) {
  std::copy_n(logits, outputs, logits_.data() + size_t(r) * size_t(outputs));
  scratch_[0].strange[size_t(r)] = !std::all_of(logits, logits + outputs, [](float logit) { return std::isfinite(logit); });
}

int Sampler::choose(int member, int r, int position, const DraftVocabulary& ids) {
  Scratch& scratch = scratch_[member];
  if (std::any_of(scratch_.begin(), scratch_.end(), [r](const Scratch& each) { return each.strange[size_t(r)] != 0; }))
    return kNone;
  if (choice_ == Choice::kStore) {
    const float* scores = logits(r, ids.size());
    if (!logprobs_.empty()) scratch.raw.assign(scores, scores + ids.size());
    edit(r, ids);
    const int token = choose_stored(scratch, scores, position, ids);
    if (!logprobs_.empty()) logprobs_[r] = logprobs_of(kernels_, scratch.raw.data(), ids.size(), token, sampling_.logprobs);
    return token;
  }
  if (choice_ == Choice::kBest) {
    Candidate best = scratch_[0].best[r];
    for (const Scratch& other : scratch_)
      if (other.best[r] < best) best = other.best[r];
    return best.id;
  }
  // The best of what each member kept are the best of all.
  auto& candidates = scratch.candidates;
  candidates.clear();
  for (const Scratch& other : scratch_) candidates.insert(candidates.end(), other.top[r].begin(), other.top[r].end());
  return choose_among(scratch, position, 0.0);
}

double Sampler::confidence(int r, int token, const DraftVocabulary& ids) const {
  const float* scores = logits(r, ids.size());
  const int index = ids.index_of(token);
  float max, sum;
  kernels_.soft_sum(scores, ids.size(), 1.0f, &max, &sum);
  const double chance = std::exp(double(scores[index]) - double(max)) / double(sum);
  return chance > 0.0 ? std::min(chance, 1.0) : 0.0;   // 0 also where it is no number
}

float Sampler::penalise(float score, int id, int position) const {
  if (first_seen_[id] >= position) return score;
  return score < 0.0f ? score * sampling_.repetition_penalty : score / sampling_.repetition_penalty;
}

// Of the ids that the answer holds before the position, in scratch.scores.
void Sampler::penalise_answer(Scratch& scratch, int position, const DraftVocabulary& ids) const {
  scratch.counts.resize(first_seen_.size());
  for (int p = sampling_.answer; p < position; ++p) ++scratch.counts[ids_[p]];
  for (int p = sampling_.answer; p < position; ++p) {
    const int count = std::exchange(scratch.counts[ids_[p]], 0), index = ids.index_of(ids_[p]);
    if (count > 0 && index >= 0)
      scratch.scores[index] -= float(double(sampling_.frequency_penalty) * count + double(sampling_.presence_penalty));
  }
}

Logprobs Sampler::logprobs_of(const Kernels& kernels, const float* logits, int n, int token, int most) {
  Logprobs logprobs;
  if (token == kNone) return logprobs;
  most = std::min(most, n);
  float max, sum;
  kernels.soft_sum(logits, n, 1.0f, &max, &sum);
  const double rest = double(max) + std::log(double(sum));
  std::vector<Candidate> top;
  for (int id = 0; id < n && most > 0; ++id)
    if (int(top.size()) < most || logits[id] > top.front().score) keep_best(&top, most, {logits[id], id});
  std::sort(top.begin(), top.end());
  logprobs.own = float(logits[token] - rest);
  for (const Candidate& candidate : top) logprobs.top.emplace_back(candidate.id, float(candidate.score - rest));
  return logprobs;
}

int Sampler::choose_stored(Scratch& scratch, const float* raw, int position, const DraftVocabulary& ids) {
  const float* scores = raw;
  const int n = ids.size();
  auto id_of = [&](int i) { return ids.ids() ? ids.ids()[i] : i; };
  if (sampling_.penalised() || sampling_.counted()) {
    scratch.scores.assign(raw, raw + n);
    if (sampling_.penalised())
      for (int i = 0; i < n; ++i) scratch.scores[i] = penalise(raw[i], id_of(i), position);
    if (sampling_.counted()) penalise_answer(scratch, position, ids);
    scores = scratch.scores.data();
  }
  if (sampling_.temperature == 0.0f) {
    const float* best = std::max_element(scores, scores + n);
    return *best == kLowest ? kNone : id_of(int(best - scores));
  }

  const float inverse = 1.0f / sampling_.temperature;
  const bool filtered = sampling_.top_k > 0 || sampling_.top_p < 1.0f || sampling_.min_p > 0.0f;
  if (!filtered) return kernels_.choose(scores, ids.ids(), n, inverse, sampling_.seed, position).id;

  // Few ids matter: those within a margin of the best, and ever more of them until the filters have what they need.
  const int usable = int(n - std::count(scores, scores + n, kLowest));
  if (usable == 0) return kNone;   // a draft vocabulary may hold nothing that the mask allows
  float max, total;   // total: of exp((score - max) / T) over all ids
  kernels_.soft_sum(scores, n, inverse, &max, &total);
  auto& candidates = scratch.candidates;
  for (float margin = 8.0f;; margin *= 2.0f) {
    candidates.clear();
    double covered = 0.0;
    const float bar = max - margin * sampling_.temperature;
    for (int i = 0; i < n; ++i)
      if (scores[i] >= bar && scores[i] != kLowest) {
        candidates.push_back({scores[i], id_of(i)});
        covered += std::exp((scores[i] - max) * inverse);
      }
    const bool enough = sampling_.top_k > 0     ? int(candidates.size()) >= sampling_.top_k
                        : sampling_.top_p < 1.0f ? covered >= double(sampling_.top_p) * total
                                                 : std::exp(-margin) < sampling_.min_p;
    if (enough || int(candidates.size()) == usable || std::isinf(margin))
      return choose_among(scratch, position, sampling_.top_k > 0 ? 0.0 : total);
  }
}

// Of the candidates' penalised scores: top-k, then top-p, then min-p, then the arg-max with noise. `total` is the sum of
// exp((score - best) / T) that probabilities are shares of; 0: that of the top_k.
int Sampler::choose_among(Scratch& scratch, int position, double total) {
  auto& candidates = scratch.candidates;
  if (candidates.empty()) return kNone;
  const double inverse = 1.0 / sampling_.temperature;
  if (sampling_.top_k > 0 || sampling_.top_p < 1.0f || sampling_.min_p > 0.0f) {
    std::sort(candidates.begin(), candidates.end());
    if (sampling_.top_k > 0 && int(candidates.size()) > sampling_.top_k) candidates.resize(sampling_.top_k);
    const float best = candidates.front().score;
    auto weight = [&](const Candidate& candidate) { return std::exp((candidate.score - best) * inverse); };
    if (sampling_.top_p < 1.0f) {
      if (total == 0.0)
        for (const Candidate& candidate : candidates) total += weight(candidate);
      double before = 0.0;   // what the ids ahead of this one hold
      size_t keep = 0;
      while (keep < candidates.size() && (keep == 0 || before < double(sampling_.top_p) * total))
        before += weight(candidates[keep++]);
      candidates.resize(keep);
    }
    while (candidates.size() > 1 && weight(candidates.back()) < sampling_.min_p) candidates.pop_back();
  }
  const int count = int(candidates.size());
  scratch.noise.resize(count);
  scratch.noise_ids.resize(count);
  for (int i = 0; i < count; ++i) scratch.noise_ids[i] = candidates[i].id;
  kernels_.gumbel(sampling_.seed, position, scratch.noise_ids.data(), count, scratch.noise.data());
  Candidate chosen = kNoCandidate;
  for (int i = 0; i < count; ++i) {
    const Candidate noisy{candidates[i].score * float(inverse) + scratch.noise[i], candidates[i].id};
    if (noisy < chosen) chosen = noisy;
  }
  return chosen.id;
}

}  // namespace ppsd
