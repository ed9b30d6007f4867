#include "pass_times.h"

#include <algorithm>

namespace ppsd {
namespace {

constexpr double kFades = 0.98;        // what a pass weighs after each further one
constexpr double kDisturbed = 1.5;     // times what was expected: more is somebody else's doing, and counts as this much
constexpr double kTrusted = 3.0;       // passes, after which that is known
constexpr double kFixedRows = 5.0;     // the guess: reading the weights takes as long as so many rows
constexpr double kGuessSpread = 0.05;  // and it counts as passes whose rows differ by this share of them

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
}

double PassTime::operator()(int rows) const { return at_none_ + each_ * rows; }

}  // namespace ppsd
