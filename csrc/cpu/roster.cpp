#include "roster.h"

#include <algorithm>

namespace ppsd {
namespace {

// Seconds that the members together have slept more than is bearable, until one of them leaves. A burst of another program,
// or of this one (a server that reads sixteen new requests), passes; a neighbour that stays does not.
constexpr double kTolerated = 0.04;
constexpr double kTrial = 0.012;    // the same, while a member is tried
constexpr double kProven = 0.25;    // seconds after which it is not on trial any more
constexpr double kPatience = 0.1;   // seconds until one more member is tried; twice as many each time that this fails ..
constexpr double kMost = 3.0;       // .. up to here

// Of the time of a pass, how much a member may sleep at barriers: what is lost then is what one member fewer costs where
// arithmetic is the limit, and less than that where memory is.
double bearable(int active) { return std::max(0.8 / active, 0.15); }

}  // namespace

bool Roster::after(double seconds, double slept) {
  if (highest_ == 1) return false;
  here_ += seconds;
  if (active() > 1) {   // while one member is away, all others sleep
    excess_ = std::max(0.0, excess_ + slept / (active() - 1) - bearable(active()) * seconds);
    if (excess_ > (tried_ ? kTrial : kTolerated)) {
      patience_ = tried_ ? std::min(2.0 * patience_, kMost) : kPatience;
      return move(-1);
    }
  }
  if (tried_ && here_ >= kProven) {
    tried_ = false;
    patience_ = kPatience;
  }
  return here_ >= patience_ && excess_ == 0.0 && level_ < highest_ && move(+1);
}

bool Roster::move(int by) {
  level_ += by;
  here_ = excess_ = 0.0;
  tried_ = by > 0;
  return true;
}

}  // namespace ppsd
