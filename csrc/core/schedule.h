// A schedule is data, which ppsd_rt/pipeline/schedule.py and stop_rules.py describe and check.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "noise.h"

namespace ppsd {

constexpr int kMaxRows = 16;              // the most rows of one verification pass
constexpr int kMaxChunk = kMaxRows - 1;   // a chunk, and the row of the last committed token

struct StopRule {
  enum class Kind { kFixed, kConfidence, kBeta, kCalibrated, kSurvival, kPaying };
  Kind kind = Kind::kFixed;
  double threshold = 0.4;   // kConfidence, kSurvival
  double discount = 0.98;   // kBeta, kCalibrated, kSurvival, kPaying
  int bins = 10;            // kCalibrated, kSurvival, kPaying
  double weight = 4.0;      // the same: the prior counts as so many verdicts
  double copy_threshold = 0.1;   // kSurvival: of copies, which cost a row and no draft step
  std::vector<double> thresholds, copy_thresholds;   // kSurvival: after so many drafts of a chunk; empty: always the same
  double cost = 0.2;        // kPaying: of a draft and its row, in plain tokens
};

struct Schedule {
  int first_chunk = 0, max_chunk = 0, lookahead = 0;
  int lookup = 0;           // tokens that must match for a draft to be copied; 0: none is
  bool recycle = false;     // they are copied from other texts too (ngrams.h), after matches of any length
  bool overlap = false;
  StopRule stop_rule;

  bool copies() const { return lookup > 0 || recycle; }   // are there drafts that the exit head is not asked for?
};

// A draft token that a verdict judged.
struct Judged {
  double confidence;
  bool accepted;
};

// A stop rule at work in one answer; see stop_rules.py for what is from the papers and what is ours.
class Controller {
 public:
  virtual ~Controller() = default;
  virtual bool stop(double confidence) = 0;                        // after a draft token: stop drafting and verify?
  virtual bool stop_copying(double chance) = 0;                    // after a copied one, which is right with this chance
  virtual bool may_copy(double, bool stopped) const { return !stopped; }   // is a copy with this chance worth its row?
  virtual void observe(const std::vector<Judged>& verdict) = 0;    // of the head's, up to and including the first rejected
  virtual void set_thresholds(const StopRule&) {}                  // what has been learned stays
  static std::unique_ptr<Controller> make(const StopRule& rule, uint64_t seed);
};

}  // namespace ppsd
