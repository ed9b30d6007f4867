// From logits to a token: the twin of ppsd_rt/reference/sampler.py.
//
//   token(p) = argmax over ids of (filtered logits / T + gumbel(seed, p, id)); T = 0: argmax of the logits
//
// One sampler for each side (draft, verification): it knows the tokens of the rows that its side has run, for the
// repetition penalty, and forgets them when rows are rolled back.
#pragma once

#include <limits>
#include <vector>

#include "kernels.h"

namespace ppsd {

struct Sampling {
  float temperature = 0.0f;
  int top_k = 0;
  float top_p = 1.0f, min_p = 0.0f, repetition_penalty = 1.0f;
  uint64_t seed = 0;
};

class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocab_size, int members);

  // A new answer, of which the first `kept` rows have been run before.
  void begin(const Sampling& sampling, int kept);
  // The tokens at positions [start, start + count): what was known from `start` on is void.
  void know(int start, const int* ids, int count);
  int known() const { return int(ids_.size()); }
  const std::vector<int>& ids() const { return ids_; }

  // How an LM head of so many outputs should deliver its results for rows that choose the tokens for these positions.
  // `store`: logits, whatever the filters.
  void begin_rows(std::vector<int> positions, int outputs, bool store);
  LogitsPhase phase(int member, const int* draft_ids, int outputs) const;
  static constexpr int kNone = std::numeric_limits<int>::max();
  // After the LM head: the token of row r; kNone: no logit is a number. Rows may be asked for by different members at the
  // same time.
  int choose(int member, int r, int position, const int* draft_ids, int outputs);
  // What would be chosen from stored logits if there were no `token`: the second choice.
  int choose_without(int token, int member, int r, int position, const int* draft_ids, int outputs);
  // The probability of `token` among the stored logits of row r, unfiltered and at temperature 1.
  double confidence(int r, int token, const int* draft_ids, int outputs) const;
  const float* logits(int r, int outputs) const { return logits_.data() + size_t(r) * outputs; }

 private:
  struct Scratch {   // of one member
    std::vector<Candidate> best;               // [rows]
    std::vector<std::vector<Candidate>> top;   // [rows][top_k]
    std::vector<Candidate> candidates;
    std::vector<float> scores, noise;
    std::vector<int> noise_ids;
  };

  static int index_of(int token, const int* draft_ids, int outputs);
  bool penalised() const { return sampling_.repetition_penalty != 1.0f; }
  int choose_stored(Scratch& scratch, const float* raw, int position, const int* draft_ids, int n);
  int choose_among(Scratch& scratch, int position, double total);
  float penalise(float score, int id, int position) const;

  const Kernels& kernels_;
  Sampling sampling_;
  std::vector<int> ids_, first_seen_;
  Choice choice_ = Choice::kBest;
  std::vector<int> positions_;                 // [rows]
  std::vector<Scratch> scratch_;
  mutable std::vector<float> logits_;          // [rows][outputs]
};

}  // namespace ppsd
