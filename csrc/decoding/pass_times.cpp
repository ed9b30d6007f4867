#include "pass_times.h"

#include <algorithm>
#include <cmath>

namespace ppsd {
namespace {

constexpr double kFades = 0.98;        // what a pass weighs after each further one
constexpr double kDisturbed = 1.5;     // times what was expected: more is somebody else's doing, and counts as this much
constexpr double kTrusted = 3.0;       // passes, after which that is known
constexpr double kFixedRows = 5.0;     // the guess: reading the weights takes as long as so many rows,
constexpr double kGuessSpread = 0.05;  // and it counts as passes whose rows differ by this share of them
constexpr double kPace = 0.3;          // how much of what a pass took too long is the pace of all,
constexpr double kRecent = 0.15;       // and how much is of its number of rows,
constexpr double kBurst = 1.1;         // more than that counts as this: requests that are read meanwhile meet any number of rows
constexpr double kRemembered = 200.0;  // half of which is forgotten after so many passes

}  // namespace

void PassTime::observe(int rows, double seconds) {
  if (rows < 1 || seconds <= 0.0) return;
  if (weight_ > kTrusted) seconds = std::min(seconds, kDisturbed * (*this)(rows));
  for (double* sum : {&weight_, &rows_, &squares_, &seconds_, &products_}) *sum *= kFades;
  weight_ += 1.0;
  rows_ += rows;
  squares_ += double(rows) * rows;
  seconds_ += seconds;
  products_ += rows * seconds;
  const double mean_rows = rows_ / weight_, mean = seconds_ / weight_;
  const double variance = squares_ / weight_ - mean_rows * mean_rows, together = products_ / weight_ - mean_rows * mean;
  const double guess = mean / (mean_rows + kFixedRows), spread = kGuessSpread * mean_rows * kGuessSpread * mean_rows;
  each_ = std::clamp((together + spread * guess) / (variance + spread), 0.0, mean / mean_rows);
  at_none_ = mean - each_ * mean_rows;
  Seen& seen = seen_[size_t(std::min(rows, kPassRows))];
  const double ratio = seconds / (pace_ * line(rows));
  if (seen.pass == 0) {
    seen.ratio = ratio;
  } else {
    const double step = std::min(ratio / seen.ratio, kBurst);
    pace_ *= std::pow(step, kPace);
    seen.ratio *= std::pow(step, kRecent);
  }
  seen.pass = ++passes_;
  expect();
}

double PassTime::operator()(int rows) const {
  const int most = std::min(rows, kPassRows);
  return expected_[size_t(most)] + (rows - most) * pace_ * each_;
}

// By what passes with so many rows took, or with fewer, if there was none. `allot` asks hundreds of times in a round.
void PassTime::expect() {
  double factor = 1.0, least = 0.0;
  for (int rows = 1; rows <= kPassRows; ++rows) {
    const Seen& seen = seen_[size_t(rows)];
    if (seen.pass != 0) factor = 1.0 + std::exp2(-double(passes_ - seen.pass) / kRemembered) * (seen.ratio - 1.0);
    expected_[size_t(rows)] = std::max(pace_ * line(rows) * factor, least);
    if (seen.pass != 0) least = expected_[size_t(rows)];
  }
}

}  // namespace ppsd
