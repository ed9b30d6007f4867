// The ids that a head scores. An exit head drafts from those that its file lists, and from those that stand in the text at hand:
// some hundred of these are worth more than ten thousand frequent ones, for summaries and translations above all.
#pragma once

#include <utility>
#include <vector>

#include "model.h"

namespace ppsd {

class DraftVocabulary {
 public:
  static constexpr int kMost = 512;   // ids of the text: the newest ones

  explicit DraftVocabulary(int outputs) : size_(outputs) {}   // a whole vocabulary
  // listed: ascending. lm_head: [vocabulary][hidden]; rows of the text's ids are packed from it in this format. Not present: the
  // text adds none.
  DraftVocabulary(const Kernels& kernels, const std::vector<int>& listed, const Tensor& lm_head, Format format);

  // Whose rows somebody else has. follows: the text adds its ids.
  DraftVocabulary(const std::vector<int>& listed, bool follows) : follows_(follows), size_(int(listed.size())), ids_(listed) {}

  // The text's ids so far. What it has of them depends on the text alone, not on when it was told.
  void follow(const std::vector<int>& text);
  void roll_back(int length) { followed_ = followed_ < length ? followed_ : length; }   // later tokens are others now

  const int* ids() const { return ids_.empty() ? nullptr : ids_.data(); }   // [size()]; null: 0, 1, ...
  int size() const { return size_; }
  int index_of(int id) const;                  // -1: it is not among them
  const Matrix& own() const { return own_; }   // the rows of the LM head for the last ids: those of the text

 private:
  int listed() const { return size_ - own_.outputs; }
  std::vector<std::pair<int, int>>::const_iterator place_of(int id) const;
  void put(int id, int position);

  const Kernels* kernels_ = nullptr;   // null: no rows are packed
  Tensor lm_head_;
  bool follows_ = false;
  int size_;
  std::vector<int> ids_;                       // the listed ones, then the text's
  Matrix own_;
  Memory memory_;
  std::vector<std::pair<int, int>> places_;    // of the text's: (id, output of own_), by id
  std::vector<int> last_;                      // [outputs of own_]: the last position that holds the id
  int followed_ = 0;                           // tokens of the text
};

}  // namespace ppsd
