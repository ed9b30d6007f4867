// Of one answer, hidden states after the early layers: of rows that verification has yet to see, or the exit head's own layers.
//
// The exit head's layers lag behind: rows that nothing is drawn from pass them together, with the next draft or where a block
// of the KV cache is whole.
#pragma once

#include <algorithm>
#include <map>
#include <stdexcept>
#include <vector>

#include "../core/protocol.h"

namespace ppsd {

class ExitRows {
 public:
  explicit ExitRows(size_t hidden) : hidden_(hidden) {}

  int first() const { return first_; }
  int end() const { return first_ + int(states_.size() / hidden_); }
  // [end() - row][hidden], until rows are added or forgotten. Throws std::logic_error.
  float* at(int row) {
    if (row < first_ || row >= end()) throw std::logic_error("a row's exit state is asked for, and nobody has kept it");
    return states_.data() + size_t(row - first_) * hidden_;
  }

  void restart(int row) {   // nothing is here; the next row is this one
    states_.clear();
    drawn_.clear();
    first_ = row;
  }
  void add(const float* states, int rows) { states_.insert(states_.end(), states, states + size_t(rows) * hidden_); }
  void drew(int row, std::vector<float> state) { drawn_[row] = std::move(state); }   // a head with a tap: ModelBackend::Draw::drawn
  std::vector<float> drawn(int row, int rows) {   // [rows][hidden]; of those that it has not drawn from as `at`
    std::vector<float> all(at(row), at(row + rows - 1) + hidden_);
    for (auto at = drawn_.lower_bound(row); at != drawn_.lower_bound(row + rows); ++at)
      std::copy(at->second.begin(), at->second.end(), all.begin() + ptrdiff_t(size_t(at->first - row) * hidden_));
    return all;
  }
  void cut(int end) {   // rows from `end` on are void
    drawn_.erase(drawn_.lower_bound(end), drawn_.end());
    states_.resize(size_t(std::clamp(end - first_, 0, int(states_.size() / hidden_))) * hidden_);
  }
  void forget(int before) {   // rows before this one
    const int rows = std::clamp(before - first_, 0, int(states_.size() / hidden_));
    states_.erase(states_.begin(), states_.begin() + ptrdiff_t(size_t(rows) * hidden_));
    first_ += rows;
    drawn_.erase(drawn_.begin(), drawn_.lower_bound(before));
  }

 private:
  const size_t hidden_;
  int first_ = 0;
  std::vector<float> states_;   // [rows from first_ on][hidden]
  std::map<int, std::vector<float>> drawn_;   // by position
};

}  // namespace ppsd
