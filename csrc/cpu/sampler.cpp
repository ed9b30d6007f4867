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

void Sampler::begin(const Sampling& sampling, int kept) {
  sampling_ = sampling;
  const std::vector<int> ids(ids_.begin(), ids_.begin() + kept);
  std::fill(first_seen_.begin(), first_seen_.end(), kNever);
  ids_.clear();
  know(0, ids.data(), kept);
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
}

void Sampler::begin_rows(std::vector<int> positions, int outputs, bool store) {
  positions_ = std::move(positions);
  const size_t rows = positions_.size();
  const bool filters_all = sampling_.top_p < 1.0f || sampling_.min_p > 0.0f;
  if (store) choice_ = Choice::kStore;
  else if (sampling_.temperature == 0.0f) choice_ = Choice::kBest;
  else if (sampling_.top_k > 0) choice_ = Choice::kTop;
  else choice_ = filters_all ? Choice::kStore : Choice::kBest;
  if (choice_ == Choice::kStore && logits_.size() < rows * outputs) logits_.resize(rows * outputs);
  for (Scratch& scratch : scratch_) {
    scratch.best.assign(rows, kNoCandidate);
    if (choice_ == Choice::kTop) {
      scratch.top.resize(std::max(scratch.top.size(), rows));
      for (auto& top : scratch.top) {
        top.clear();
        top.reserve(sampling_.top_k);
      }
    }
  }
}

LogitsPhase Sampler::phase(int member, const int* draft_ids, int outputs) const {
  LogitsPhase phase{};
  phase.rows = int(positions_.size());
  phase.positions = positions_.data();
  phase.choice = choice_;
  phase.draft_ids = draft_ids;
  // Stored logits are penalised when the token is chosen: confidence wants them as they are.
  phase.repetition_penalty = sampling_.repetition_penalty;
  phase.first_seen = penalised() && choice_ != Choice::kStore ? first_seen_.data() : nullptr;
  phase.inverse_temperature = sampling_.temperature > 0.0f ? 1.0f / sampling_.temperature : 0.0f;
  phase.seed = sampling_.seed;
  phase.top_k = std::min(sampling_.top_k, outputs);
  phase.best = const_cast<Candidate*>(scratch_[member].best.data());
  phase.top = const_cast<std::vector<Candidate>*>(scratch_[member].top.data());
  phase.logits = logits_.data();
  return phase;
}

int Sampler::choose(int member, int r, int position, const int* draft_ids, int outputs) {
  Scratch& scratch = scratch_[member];
  if (choice_ == Choice::kStore) return choose_stored(scratch, logits(r, outputs), position, draft_ids, outputs);
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

int Sampler::choose_without(int token, int member, int r, int position, const int* draft_ids, int outputs) {
  float& score = logits_[size_t(r) * outputs + index_of(token, draft_ids, outputs)];
  const float was = std::exchange(score, kLowest);
  const int second = choose(member, r, position, draft_ids, outputs);
  score = was;
  return second;
}

int Sampler::index_of(int token, const int* draft_ids, int outputs) {
  return draft_ids ? int(std::lower_bound(draft_ids, draft_ids + outputs, token) - draft_ids) : token;
}

double Sampler::confidence(int r, int token, const int* draft_ids, int outputs) const {
  const float* scores = logits(r, outputs);
  const int index = index_of(token, draft_ids, outputs);
  float max, sum;
  kernels_.soft_sum(scores, outputs, 1.0f, &max, &sum);
  const double chance = std::exp(double(scores[index]) - double(max)) / double(sum);
  return chance > 0.0 ? std::min(chance, 1.0) : 0.0;   // 0 also where it is no number
}

float Sampler::penalise(float score, int id, int position) const {
  if (first_seen_[id] >= position) return score;
  return score < 0.0f ? score * sampling_.repetition_penalty : score / sampling_.repetition_penalty;
}

int Sampler::choose_stored(Scratch& scratch, const float* raw, int position, const int* draft_ids, int n) {
  const float* scores = raw;
  auto id_of = [&](int i) { return draft_ids ? draft_ids[i] : i; };
  if (penalised()) {
    scratch.scores.resize(n);
    for (int i = 0; i < n; ++i) scratch.scores[i] = penalise(raw[i], id_of(i), position);
    scores = scratch.scores.data();
  }
  if (sampling_.temperature == 0.0f) return id_of(int(std::max_element(scores, scores + n) - scores));

  const float inverse = 1.0f / sampling_.temperature;
  const bool filtered = sampling_.top_k > 0 || sampling_.top_p < 1.0f || sampling_.min_p > 0.0f;
  if (!filtered) return kernels_.choose(scores, draft_ids, n, inverse, sampling_.seed, position).id;

  // Few ids matter: those within a margin of the best, and ever more of them until the filters have what they need.
  float max, total;   // total: of exp((score - max) / T) over all ids
  kernels_.soft_sum(scores, n, inverse, &max, &total);
  auto& candidates = scratch.candidates;
  for (float margin = 8.0f;; margin *= 2.0f) {
    candidates.clear();
    double covered = 0.0;
    const float bar = max - margin * sampling_.temperature;
    for (int i = 0; i < n; ++i)
      if (scores[i] >= bar) {
        candidates.push_back({scores[i], id_of(i)});
        covered += std::exp((scores[i] - max) * inverse);
      }
    const bool enough = sampling_.top_k > 0     ? int(candidates.size()) >= sampling_.top_k
                        : sampling_.top_p < 1.0f ? covered >= double(sampling_.top_p) * total
                                                 : std::exp(-margin) < sampling_.min_p;
    if (enough || int(candidates.size()) == n || std::isinf(margin))
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
