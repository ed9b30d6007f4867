#include "pass_times.h"

#include <algorithm>
#include <cmath>

namespace ppsd {
namespace {

constexpr double kFades = 0.98;        // what a pass weighs after each further one
// Times what was expected: more is somebody else's doing, and counts as this much. So little that one long pass makes no number
// of rows seem dear, which nobody would try again then; where all passes take longer, each says so. More while little is known.
constexpr double kDisturbed = 1.1, kAtFirst = 1.5;
constexpr double kTrusted = 3.0;       // passes, after which that is known
constexpr double kFixedRows = 5.0;     // the guess: reading the weights takes as long as so many rows,
constexpr double kGuessSpread = 0.05;  // and it counts as passes whose rows differ by this share of them
constexpr double kPace = 0.3;          // how much of what a pass took too long is the pace of all,
constexpr double kRecent = 0.15;       // and how much is of its number of rows; more while few had that,
constexpr double kRemembered = 200.0;  // half of which is forgotten after so many passes

}  // namespace

double PassTime::observe(int rows, double seconds) {
  if (rows < 1 || seconds <= 0.0) return 0.0;
  Seen& seen = seen_[size_t(std::min(rows, kPassRows))];
  const double believed = known() ? (*this)(rows) : seconds;
  if (weight_ > kTrusted) seconds = std::min(seconds, (seen.count < kTrusted ? kAtFirst : kDisturbed) * believed);
  else if (seen.pass != 0 && kAtFirst * seconds < believed) seconds_ *= seconds / believed, products_ *= seconds / believed;   // those before were disturbed
  for (double* sum : {&weight_, &rows_, &squares_, &seconds_, &products_}) *sum *= kFades;
  weight_ += 1.0;
  rows_ += rows;
  squares_ += double(rows) * rows;
  seconds_ += seconds;
  products_ += rows * seconds;
  fit();
  const double ratio = seconds / (pace_ * line(rows)), step = ratio / seen.ratio;
  if (seen.pass != 0) pace_ *= std::pow(step, kPace);
  seen.ratio *= std::pow(step, std::max(kRecent, 1.0 / (++seen.count + 1)));
  seen.pass = ++passes_;
  expect();
  return seconds;
}

// The line.
void PassTime::fit() {
  const double mean_rows = rows_ / weight_, mean = seconds_ / weight_;
  const double variance = squares_ / weight_ - mean_rows * mean_rows, together = products_ / weight_ - mean_rows * mean;
  const double guess = mean / (mean_rows + kFixedRows), spread = kGuessSpread * mean_rows * kGuessSpread * mean_rows;
  each_ = std::clamp((together + spread * guess) / (variance + spread), 0.0, mean / mean_rows);
  at_none_ = mean - each_ * mean_rows;
}

std::vector<double> PassTime::learned() const {
  std::vector<double> numbers{weight_, rows_, squares_, seconds_, products_};
  if (!known()) return std::vector<double>(kNumbers);
  for (int rows = 1; rows <= int(kNumbers) - 5; ++rows) numbers.push_back(seen_[size_t(rows)].pass != 0 ? (*this)(rows) : 0.0);
  return numbers;
}

void PassTime::know(const double* numbers) {
  *this = {};
  if (!(numbers[0] > 0.0 && numbers[1] >= numbers[0] && numbers[3] > 0.0)) return;
  const double share = std::min(1.0, kTrusted / numbers[0]);
  for (double* sum : {&weight_, &rows_, &squares_, &seconds_, &products_}) *sum = share * *numbers++;
  fit();
  passes_ = 1;
  for (int rows = 1; rows <= int(kNumbers) - 5; ++rows) {
    if (const double seconds = *numbers++; seconds > 0.0 && line(rows) > 0.0) seen_[size_t(rows)] = {seconds / line(rows), passes_, 1};
  }
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
