// From logits to a token: the twin of tests/sampler_twin.py.
//
//   token(p) = argmax over ids of (filtered logits / T + gumbel(seed, p, id)); T = 0: argmax of the logits
//
// One sampler for each side (draft, verification): it knows the tokens of the rows that its side has run, for the
// penalties, and forgets them when rows are rolled back.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../core/protocol.h"
#include "draft_vocabulary.h"

namespace ppsd {

// -- which ids may come next in an answer: a grammar's answer, or a test's --

// A grammar gives up in the middle of an answer.
class MaskFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Asked by one stage, in its own thread. An id that it forbids may come all the same, as a draft that is wrong: what
// follows that is void, and all ids are allowed there.
class TokenMask {
 public:
  virtual ~TokenMask() = default;
  // The answer's ids from `start` on are `ids` now, those before are as they were. Row r of bits [rows][words of 32 ids],
  // lowest bit first: which ids may follow the answer without its last rows - 1 - r ids. Throws MaskFailed.
  virtual void fill(int start, const std::vector<int>& ids, int rows, uint32_t* bits) = 0;

  static int words(int vocab_size) { return (vocab_size + 31) / 32; }
};

struct Sampling {
  float temperature = 0.0f;
  int top_k = 0;
  float top_p = 1.0f, min_p = 0.0f, repetition_penalty = 1.0f;
  float presence_penalty = 0.0f, frequency_penalty = 0.0f;   // taken off the logits of ids in the answer: once, and each time
  std::vector<std::pair<int, float>> logit_bias;             // ids, and what is added to their logits; no id twice
  int answer = 0;       // the position at which the answer begins
  int min_tokens = 0;   // of the answer, among which there are none of
  std::vector<int> stop_ids;
  int logprobs = -1;    // the most probable ids to report for every token; -1: nothing is reported
  std::shared_ptr<TokenMask> draft_mask, mask;   // of a grammar, for each side its own; null: there is none
  uint64_t seed = 0;

  bool penalised() const { return repetition_penalty != 1.0f; }
  bool counted() const { return presence_penalty != 0.0f || frequency_penalty != 0.0f; }
  bool bans_stops(int position) const { return position - answer < min_tokens && !stop_ids.empty(); }
  bool looks_back() const { return penalised() || counted() || mask; }   // a token's choice depends on which ids precede it
};

class Sampler {
 public:
  Sampler(const Kernels& kernels, int vocab_size, int members);

  void begin(const Sampling& sampling);   // a new answer
  // The tokens at positions [start, start + count): what was known from `start` on is void.
  void know(int start, const int* ids, int count);
  int known() const { return int(ids_.size()); }
  const std::vector<int>& ids() const { return ids_; }

  // How an LM head of so many ids should deliver its results for rows that choose the tokens for these positions.
  // `store`: logits, whatever the filters.
  void begin_rows(std::vector<int> positions, int outputs, bool store);
  // How the row for a position chooses, where temperature and seed are all that matters: such rows of several texts can be
  // given to the LM head together, without begin_rows and choose.
  std::optional<RowChoice> alike(int position) const;
  float temperature() const { return sampling_.temperature; }
  LogitsPhase phase(int member, const DraftVocabulary& ids) const;
  void give(int r, const float* logits, int outputs);   // where somebody else has computed them, of row r, to be stored
  static constexpr int kNone = std::numeric_limits<int>::max();
  // After the LM head, once: the token of row r; kNone: a logit is NaN or infinite, or nothing may be chosen. Rows may be asked for by different members at
  // the same time. Adds the bias to stored logits, and takes out what the mask forbids.
  int choose(int member, int r, int position, const DraftVocabulary& ids);
  // The probability of `token` among the stored logits of row r after `choose`: no penalty, no filter, temperature 1.
  double confidence(int r, int token, const DraftVocabulary& ids) const;
  // Of the rows that have been chosen for, of the logits as the model gives them; empty if they are not asked for.
  std::vector<Logprobs> take_logprobs() { return std::move(logprobs_); }
  const float* logits(int r, int outputs) const { return logits_.data() + size_t(r) * outputs; }
  // Of a whole vocabulary's logits [n], at temperature 1: of this id, and the `most` best.
  static Logprobs logprobs_of(const Kernels& kernels, const float* logits, int n, int token, int most);

 private:
  struct Scratch {   // of one member
    std::vector<Candidate> best;               // [rows]
    std::vector<std::vector<Candidate>> top;   // [rows][top_k]
    std::vector<Candidate> candidates;
    std::vector<float> scores, noise, raw;
    std::vector<int> noise_ids;
    std::vector<uint8_t> strange;              // [rows]
    std::vector<int> counts;                   // [vocabulary], zeros between uses
  };

  void ask_mask();
  void edit(int r, const DraftVocabulary& ids);
  void penalise_answer(Scratch& scratch, int position, const DraftVocabulary& ids) const;
  int choose_stored(Scratch& scratch, const float* raw, int position, const DraftVocabulary& ids);
  int choose_among(Scratch& scratch, int position, double total);
  float penalise(float score, int id, int position) const;

  const Kernels& kernels_;
  Sampling sampling_;
  std::vector<int> ids_, first_seen_;
  Choice choice_ = Choice::kBest;
  std::vector<int> positions_;                 // [rows]
  std::vector<Scratch> scratch_;
  std::vector<Logprobs> logprobs_;             // [rows], or none
  std::vector<uint32_t> allowed_;              // [rows][words of the vocabulary], with a mask
  int told_ = 0;                               // ids of the answer that the mask knows
  mutable std::vector<float> logits_;          // [rows][outputs]
};

}  // namespace ppsd
