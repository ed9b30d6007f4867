// What passes between the stages: chunks forward, verdicts back. See docs/design/loop.md for the words.
//
// Positions count tokens from 0, the prompt included. A row is a token on its way through the layers; row p yields the
// token for position p + 1.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "noise.h"

namespace ppsd {

// What is said where a logit is NaN or infinite.
constexpr char kNoNumber[] = "the model's output is not a number: its weights are damaged, or overflow in this format";

// True when the work at hand has become void; stages ask at layer boundaries.
using Cancelled = std::function<bool()>;

struct Limits {
  int end = 0;                 // the committed text ends before this position (token budget or context)
  std::vector<int> stop_ids;   // or at one of these
  int own = 0;                 // of the text that decoding begins with, so many last tokens are the answer's already
};

// The newest row that has passed all layers, as the last one left it: what exit heads of the kind `feedback` draw on.
struct Feedback {
  int position = -1;
  std::vector<float> hidden;         // and behind it, for a head with a tap, what the row was there
  mutable std::vector<float> heard;  // what such a head makes of both, once it has drawn on them
};

// The log-probability of a token, and the most probable ids with theirs, by the model's own logits.
struct Logprobs {
  float own = 0.0f;
  std::vector<std::pair<int, float>> top;
};

// The draft stage's next step: rows to run through the early layers, then perhaps the exit head on the last of them.
struct DraftStep {
  int start = 0;               // first row to run; rows from here on that the stage holds are void
  std::vector<int> ids;        // may be empty: only the head is asked
  int copied = 0;              // so many of the ids, the last ones, are drafts that were copied just now
  bool draw = false;           // draw a draft token for position start + ids.size()
  int depth = 0;               // how many draft tokens wait for their verdict already
  std::shared_ptr<const Feedback> feedback;   // of the newest committed row, or null; it is never waited for
};

struct Draft {
  int token = 0;
  double confidence = 0.0;     // the exit head's own probability, or the chance of a copy
  int copied = 0;              // 0: drawn by the exit head; else copied, after a match of this kind (ngrams.h)
};

// Drafts that are right by a coin, for benchmarks: what is drafted at position p is `truth[p]` with probability `acceptance`, else
// another id; the same seed gives the same mistakes. The work of drafting is done all the same.
struct Oracle {
  std::vector<int> truth;
  double acceptance = 1.0;
  uint64_t seed = 0;

  Draft instead_of(const Draft& draft, int position, int vocabulary) const {   // where it knows the truth
    if (position >= int(truth.size())) return draft;
    const int right = truth[size_t(position)];
    return {coin(seed, position) < acceptance ? right : (right + 1) % vocabulary, acceptance};
  }
};

// Consecutive rows on their way through verification.
struct Chunk {
  uint64_t epoch = 0;
  int start = 0;               // rows from here on that a stage holds are void
  std::vector<int> ids;        // the tokens of the rows

  int rows() const { return int(ids.size()); }
};

// The model's own tokens after each row of a chunk.
struct Verdict {
  uint64_t epoch = 0;
  int start = 0;
  std::vector<int> true_ids;
  std::vector<float> hidden;   // [rows, hidden]: what the last layer made of them; empty: no head asks for it
  std::vector<Logprobs> logprobs;   // of true_ids; empty: nobody asks for them
};

// One verification pass and what it committed; the fields are those of ppsd_rt/pipeline/rounds.py.
struct Round {
  uint64_t epoch = 0;
  int position = 0;
  int rows = 0;
  std::vector<int> committed;
  std::vector<Logprobs> logprobs;   // of these; empty: nobody asks for them
  std::vector<Draft> judged;
  int accepted = 0;
  int dropped = 0;
  int copied = 0;              // of the drafts, judged or dropped: those that were copied
  bool prompt = false;
};

// A draft token was drawn for `position`; a later Round says what became of it.
struct Drafted {
  int position = 0;
  int token = 0;
};

using Event = std::variant<Round, Drafted>;

// The drafts that were copied for a step.
inline std::vector<Drafted> copied_for(const DraftStep& step) {
  std::vector<Drafted> copies;
  const int rows = int(step.ids.size());
  for (int row = rows - step.copied; row < rows; ++row) copies.push_back({step.start + row, step.ids[row]});
  return copies;
}

}  // namespace ppsd
