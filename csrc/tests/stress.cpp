// The loop under stress: random schedules and cancellations, alone and in company, against plain decoding.
//
//     stress SECONDS [SEED] [TOKENS]
//
// The real CPU library with a small random model. Meant to run under the thread, address and undefined-behaviour sanitizers
// (`make sanitize`); prints one line. TOKENS: answers go on until so many have been compared with plain decoding.
#include <chrono>
#include <memory>
#include <thread>

#include "../cpu/team.h"
#include "check.h"

namespace ppsd::test {
namespace {

using Clock = std::chrono::steady_clock;

// A core that does not exist: the thread works all the same, and the team says so.
void unpinned_threads_work() {
  Team team(3, {0, 1020, 1021});
  team.keep_all();
  check(team.pin_problem().find("could not be pinned to core 102") != std::string::npos, "a pinning problem is not told", "Team");
  std::atomic<int> worked{0};
  for (int pass = 0; pass < 100; ++pass)
    team.run([&](int) {
      team.barrier();
      ++worked;
    });
  check(worked == 300, "a member did not work", "Team");
}

// A member that has lost its core is left out until it has it back, and every unit of work is done once all the same.
void crowded_teams_shrink_and_grow() {
  constexpr int kUnits = 50;
  Team team(3, {});
  Shares shares(team.size());
  bool crowded = true;
  team.judge_by([&](int active) { return Team::Pass{0.005, crowded && active > 1 ? 0.0045 * (active - 1) : 0.0}; });
  const auto pass = [&] {
    std::atomic<int> done{0};
    shares.reset();
    team.run([&](int member) {
      team.share(shares, member, kUnits, 1, [&](int begin, int end) { done += end - begin; });
      team.barrier();
      check(done == kUnits, "units of work are not done after the barrier", "Team");
    });
  };
  for (int i = 0; i < 60; ++i) pass();
  check(team.active() == 1, "a crowded team does not shrink", "Team");
  crowded = false;
  for (int i = 0; i < 200; ++i) pass();
  check(team.active() == 3, "a team that has shrunk does not grow again", "Team");

  Team waiting(3, {});   // and by the clock: sooner or later two that wait for the third have slept too long
  while (waiting.active() == 3)
    waiting.run([&](int member) {
      if (member == 2) std::this_thread::sleep_for(std::chrono::milliseconds(4));
      waiting.barrier();
    });
}

int run(double seconds, uint64_t seed, int64_t tokens) {
  const auto begin = Clock::now();
  unpinned_threads_work();
  crowded_teams_shrink_and_grow();
  const auto end = begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  const Played played =
      many_answers([&](const Played& so_far) { return Clock::now() >= end && so_far.tokens >= tokens; }, seed);
  std::printf("stress: ok, %lld answers of the loop (%lld tokens), seed %llu\n", (long long)played.answers,
              (long long)played.tokens, (unsigned long long)seed);
  return 0;
}

}  // namespace
}  // namespace ppsd::test

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10.0;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  try {
    return ppsd::test::run(seconds, seed, argc > 3 ? std::atoll(argv[3]) : 0);
  } catch (const std::exception& error) {
    ppsd::test::fail(error.what(), "an exception");
  }
}
