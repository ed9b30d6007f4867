// For benchmarks of pipelines that are not at hand: a piece of work takes as long as it is told to.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "stages.h"

namespace ppsd {

class Dwell {
 public:
  // seconds: of a pass over 1, 2, ... rows; of more rows, as much more as the last row adds.
  explicit Dwell(std::vector<double> seconds) : seconds_(std::move(seconds)) {}

  double of(int rows) const {
    const int most = int(seconds_.size());
    if (rows <= most) return rows > 0 ? seconds_[size_t(rows - 1)] : 0.0;
    const double each = most > 1 ? seconds_.back() - seconds_[size_t(most - 2)] : 0.0;
    return seconds_.back() + (rows - most) * each;
  }
  // What was overslept is taken off the next time: late wake-ups must not add up to a slower stage. begun: when the work did.
  // False: it became void meanwhile.
  bool until(std::chrono::steady_clock::time_point begun, double seconds, const Cancelled& cancelled = nullptr) {
    const std::chrono::duration<double> wanted(std::max(seconds - late_, 0.0));
    const auto end = begun + std::chrono::duration_cast<std::chrono::steady_clock::duration>(wanted);
    for (auto now = begun; cancelled && now < end; now = std::chrono::steady_clock::now()) {
      if (cancelled()) return false;
      std::this_thread::sleep_until(std::min(end, now + kPoll));
    }
    std::this_thread::sleep_until(end);
    late_ = std::min(std::chrono::duration<double>(std::chrono::steady_clock::now() - end).count(), seconds);
    return true;
  }

 private:
  static constexpr std::chrono::milliseconds kPoll{1};   // between two looks whether the work has become void

  std::vector<double> seconds_;
  double late_ = 0.0;
};

}  // namespace ppsd
