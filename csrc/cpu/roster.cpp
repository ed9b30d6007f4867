#include "roster.h"

#include <algorithm>

namespace ppsd {
namespace {

constexpr double kWindow = 0.02;    // seconds: several turns of a scheduler
constexpr double kPatience = 0.1;   // seconds until one more member is tried; twice as many each time that this fails ..
constexpr double kMost = 3.0;       // .. up to here

// Of the time of a pass, how much a member may sleep at barriers: what is lost then is what one member fewer costs where
// arithmetic is the limit, and less than that where memory is.
double bearable(int active) { return std::max(0.8 / active, 0.15); }

}  // namespace

bool Roster::after(double seconds, double slept) {
  if (highest_ == 1) return false;
  seconds_ += seconds;
  slept_ += slept;
  here_ += seconds;
  if (seconds_ < kWindow) return false;
  // While one member is away, all others sleep.
  const double lost = active() > 1 ? slept_ / (seconds_ * (active() - 1)) : 0.0;
  const bool crowded = active() > 1 && lost > bearable(active());
  seconds_ = slept_ = 0.0;
  if (crowded) {
    patience_ = tried_ ? std::min(2.0 * patience_, kMost) : kPatience;
    return move(-1);
  }
  if (here_ < patience_) return false;
  if (level_ < highest_) return move(+1);
  tried_ = false;
  return false;
}

bool Roster::move(int by) {
  level_ += by;
  here_ = 0.0;
  tried_ = by > 0;
  return true;
}

}  // namespace ppsd
