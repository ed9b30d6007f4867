// What the carriers themselves cost: microseconds a round, with stages that take no time.
//
//     overhead [TOKENS]
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>

#include "../pipeline/lockstep.h"
#include "../pipeline/simulated.h"
#include "../pipeline/toy_stages.h"
#include "check.h"

namespace ppsd::test {
namespace {

using Make = std::function<std::unique_ptr<Carrier>(Stages, const Schedule&, const Limits&, const std::vector<int>&)>;

void measure(const char* name, const Schedule& schedule, double acceptance, int tokens, const Make& make) {
  const ToyModel model{1};
  const std::vector<int> prompt = {0};
  const Limits limits{tokens + 2, {}};
  ToyDraft draft(model, limits.end, {acceptance}, 1);
  ToyVerify verify(model, limits.end, 0);
  const auto carrier = make({&draft, {&verify}}, schedule, limits, prompt);
  const std::vector<int> plain = model.plain(prompt, tokens + 1);
  std::vector<int> known = prompt;
  int rounds = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (; auto event = carrier->next(); ++rounds) check_round(std::get<Round>(*event), plain, &known, name);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  check(known == plain, "the answer is shorter than plain decoding's", name);
  std::printf("%-24s %6.2f us a round, %6.2f us a token\n", name, seconds * 1e6 / rounds, seconds * 1e6 / tokens);
}

int run(int tokens) {
  Schedule plain, serial, elastic;
  serial.first_chunk = serial.max_chunk = serial.lookahead = 4;
  elastic.first_chunk = 2, elastic.max_chunk = 8, elastic.lookahead = kMaxChunk, elastic.overlap = true;
  const Make lock_step = [](Stages stages, const Schedule& schedule, const Limits& limits, const std::vector<int>& prompt) {
    auto carrier = std::make_unique<LockStep>(stages, schedule, limits, 1, Ticks{}, false);
    carrier->begin(prompt, 0);
    return carrier;
  };
  const Make simulated = [](Stages stages, const Schedule& schedule, const Limits& limits, const std::vector<int>& prompt) {
    StageCosts costs;
    costs.row_step = 0.2, costs.draft_step = 0.3;
    costs.steps = RowTable(kMaxRows, 0.2);
    costs.verify = {{RowTable(kMaxRows, 1.0), {}}};
    auto carrier = std::make_unique<Simulated>(stages, schedule, limits, 1, costs, false);
    carrier->begin(prompt, 0);
    return carrier;
  };
  measure("lock-step, plain", plain, 0.7, tokens, lock_step);
  measure("lock-step, eesd", serial, 0.7, tokens, lock_step);
  measure("lock-step, elastic", elastic, 0.7, tokens, lock_step);
  measure("simulated, elastic", elastic, 0.7, tokens, simulated);
  return 0;
}

}  // namespace
}  // namespace ppsd::test

int main(int argc, char** argv) { return ppsd::test::run(argc > 1 ? std::atoi(argv[1]) : 20000); }
