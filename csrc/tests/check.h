// What the C++ tests share: failing with a line that says where, random numbers, and plain decoding's answer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../core/protocol.h"
#include "../core/schedule.h"

namespace ppsd::test {

[[noreturn]] inline void fail(const std::string& what, const std::string& where) {
  std::fprintf(stderr, "FAILED: %s (%s)\n", what.c_str(), where.c_str());
  std::exit(1);
}

inline void check(bool good, const char* what, const std::string& where) {
  if (!good) fail(what, where);
}

using Random = std::mt19937_64;

inline int between(Random& random, int least, int most) { return least + int(random() % uint64_t(most - least + 1)); }
inline bool chance(Random& random, int percent) { return int(random() % 100) < percent; }

// What a test has compared with plain decoding, and whether that is enough.
struct Played {
  int64_t answers = 0, tokens = 0;
};
using Enough = std::function<bool(const Played&)>;

// A thread that is waited for, whatever else goes wrong.
class Helper {
 public:
  template <class Work>
  explicit Helper(Work&& work) : thread_(std::forward<Work>(work)) {}
  ~Helper() { thread_.join(); }

 private:
  std::thread thread_;
};

// Every order of magnitude from `least` to `most` is as likely as another.
inline double spread(Random& random, double least, double most) {
  return least * std::pow(most / least, double(random() >> 11) * 0x1p-53);
}

// Any that docs/guide/schedules.md and ppsd_rt/pipeline/schedule.py allow.
inline Schedule random_schedule(Random& random) {
  Schedule schedule;
  if (chance(random, 10)) return schedule;   // plain
  schedule.max_chunk = between(random, 1, kMaxChunk);
  schedule.first_chunk = between(random, 0, schedule.max_chunk);
  const int least = std::max(schedule.first_chunk, 1);
  schedule.lookahead = chance(random, 50) ? least + between(random, 0, 12) : int(spread(random, least, 1024.0));
  schedule.overlap = chance(random, 70);
  StopRule& rule = schedule.stop_rule;
  if (chance(random, 60)) rule.kind = StopRule::Kind(random() % 6);
  rule.threshold = spread(random, 1e-3, 0.999);
  rule.cost = spread(random, 1e-3, 100.0);
  if (chance(random, 50)) rule.discount = spread(random, 1e-3, 1.0), rule.bins = between(random, 1, 20);
  if (chance(random, 60)) schedule.lookup = between(random, 1, 8);
  schedule.recycle = chance(random, 30);
  if (schedule.copies() && chance(random, 20)) schedule.lookahead = schedule.first_chunk = 0;   // copies alone
  return schedule;
}

// Rounds arrive in order, without a gap, and commit what plain decoding does; `known` grows by what they commit.
inline void check_round(const Round& round, const std::vector<int>& plain, std::vector<int>* known, const std::string& where) {
  check(round.position == int(known->size()), "a round commits at another position", where);
  check(round.accepted <= int(round.judged.size()), "more accepted than judged", where);
  for (int i = 0; i < round.accepted; ++i)
    check(round.judged[i].token == round.committed[i], "an accepted draft token was not committed", where);
  for (int token : round.committed) {
    check(known->size() < plain.size() && plain[known->size()] == token, "a token differs from plain decoding", where);
    known->push_back(token);
  }
}

// Many answers in one loop with a small random model, asked for by several threads: each is plain decoding's (many_answers.cpp).
// Until it is enough, but at least some.
Played many_answers(const Enough& enough, uint64_t seed);

}  // namespace ppsd::test
