// What passes take, by how many rows they have: measured as they are made.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "../cpu/kernels.h"

namespace ppsd {

// Seconds of one kind of pass: so much for reading the weights, and so much for each row. A line through the passes that
// were made, older ones counting less. Where they all had about as many rows, a guess says how the time is to be divided.
// Kernels take some rows together, so that the first of a group may cost what four do: passes with so many rows that were
// made lately correct the line there, and no pass of more rows is expected to take less.
class PassTime {
 public:
  // -> the seconds that it counts as
  double observe(int rows, double seconds);
  double operator()(int rows) const;   // 0: nothing has been seen
  bool known() const { return weight_ > 0.0; }
  // For a later process: what it has seen, as kNumbers numbers; and to begin with that, until passes say otherwise.
  static constexpr size_t kNumbers = 5 + 17;
  std::vector<double> learned() const;
  void know(const double* numbers);

 private:
  struct Seen {
    double ratio = 1.0;   // seconds over the line's
    int64_t pass = 0;     // the last one with so many rows; 0: there was none
    int count = 0;        // of them
  };
  double line(int rows) const { return at_none_ + each_ * rows; }
  void expect();
  void fit();

  std::array<Seen, kPassRows + 1> seen_{};
  std::array<double, kPassRows + 1> expected_{};   // by rows
  double pace_ = 1.0;   // of the last passes, over the line's
  int64_t passes_ = 0;
  double weight_ = 0.0, rows_ = 0.0, squares_ = 0.0, seconds_ = 0.0, products_ = 0.0;   // sums over passes
  double at_none_ = 0.0, each_ = 0.0;                                                   // the line
};

struct PassTimes {
  // draft: the early layers with the exit head after them, in plain tokens' passes, as a machine has its better and worse
  // moments while nothing is drafted; choose: the LM head.
  PassTime early, draft, late, choose;
  double draft_share = 0.5;              // of a whole pass's weights, those that a draft reads: until one has been measured
  double margin = 1.0;                   // times what their passes take, drafts are taken to cost
  int sharers = 1;                       // passes that are under way at once, over ranks: see draw

  double plain() const { return early(1) + verify(1); }
  double observe(PassTime PassTimes::*kind, int rows, double seconds) {   // -> the seconds that it counts as
    const double unit = kind == &PassTimes::draft ? plain() : 1.0;
    if (unit <= 0.0) return 0.0;
    // The first step is like the others, or something held it up.
    if (kind == &PassTimes::draft && !draft.known()) seconds = std::min(seconds, 2.0 * draft_share * (early(rows) + verify(rows)));
    return unit * (this->*kind).observe(rows, seconds / unit);
  }
  double verify(int rows) const { return rows > 0 ? late(rows) + choose(rows) : 0.0; }
  // Over ranks, rank 0 drafts for one pass while the others are verified. Where it has nothing else to do meanwhile, a draft
  // delays its own pass; where its turns follow one another, it delays all.
  double draw(int rows) const {
    const double step = draft.known() ? draft(rows) * plain() : draft_share * (early(rows) + verify(rows));
    const bool busy = sharers * (early(rows) + step) > early(rows) + step + verify(rows);
    return busy ? sharers * step : step;
  }
};

}  // namespace ppsd
