// An LM head or an exit head on rows of texts, each of which chooses its tokens in its own way.
#pragma once

#include <exception>
#include <utility>
#include <vector>

#include "model.h"
#include "sampler.h"

namespace ppsd {

class Head {
 public:
  Head(const Kernels& kernels, const ModelShape& shape, const PackedHead& head, int members);

  // A row of the text that the sampler knows, which chooses the token for `position`.
  struct Row {
    const float* x;   // [hidden]
    Sampler* sampler;
    int position;
    const DraftVocabulary* vocabulary = nullptr;   // that it chooses from, of an exit head; null: all ids
  };
  // By one thread, before the members begin. Rows of one sampler lie together. store: the samplers keep the logits, of the
  // first of their rows as row 0. What `x` holds is read by `pass` if the rows follow one another there, and here if not.
  void begin_pass(const std::vector<Row>& rows, bool store);
  void pass(Team& team, int member);   // by every member
  const std::vector<int>& choose(Team& team, const std::vector<Row>& rows, bool store);   // all of it, by a team
  // The rows' tokens (Sampler::kNone: as of Sampler::choose, or a grammar failed).
  const std::vector<int>& chosen();
  std::exception_ptr failure(const Sampler* sampler) const;   // of its grammar, the last time; or null

 private:
  // Rows that the kernel takes together: of one sampler, or of all that differ in temperature and seed alone.
  struct Group {
    int first = 0, rows = 0;
    Sampler* sampler = nullptr;   // null: of several
    size_t memory = 0;            // where its activations begin
    const float* x = nullptr;     // [rows][hidden]
    const DraftVocabulary* vocabulary = nullptr;
    int own_from = 0;             // where the panels begin that are its own: see share_own
  };
  void group(const std::vector<Row>& rows, bool store);
  void place(const std::vector<Row>& rows);
  void own_logits(const std::vector<LogitsPhase>& phases, int begin, int end);

  const Kernels& kernels_;
  const PackedHead& head_;
  const DraftVocabulary whole_;
  const float eps_;
  std::vector<Group> groups_;
  std::vector<std::pair<const Sampler*, std::exception_ptr>> failures_;
  std::vector<int> order_;                     // the rows as the groups have them
  std::vector<float> x_;                       // [rows][hidden] in this order, as are the others
  std::vector<int> positions_;
  std::vector<RowChoice> choices_;
  std::vector<int> chosen_;
  int panels_in_all_ = 0;                      // of the head, then those of each group's own
  std::vector<Memory> inputs_;                 // of each member
  std::vector<std::vector<LogitsPhase>> phases_;   // of each member [groups]
  std::vector<std::vector<Candidate>> best_;   // of each member [rows]
  std::vector<std::vector<uint8_t>> strange_;  // likewise
  Shares panels_;
};

}  // namespace ppsd
