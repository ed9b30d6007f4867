// The carriers under stress: random schedules, delays and cancellations, thousands of rounds, against plain decoding.
//
//     stress SECONDS [SEED] [TOKENS]
//
// First the threads carrier over toy stages (csrc/pipeline/toy_stages.h), which refuse gaps and mixed-up hidden states;
// then the real CPU library with a small random model. Meant to run under the thread, address and undefined-behaviour
// sanitizers (`make sanitize`); prints one line. TOKENS: answers of the CPU library go on until so many have been
// compared with plain decoding.
#include <chrono>
#include <memory>
#include <thread>

#include "../cpu/team.h"
#include "../pipeline/threads.h"
#include "../pipeline/toy_stages.h"
#include "check.h"
#include "cpu_answers.h"
#include "many_answers.h"

namespace ppsd::test {
namespace {

using Clock = std::chrono::steady_clock;

// Takes up to 200 microseconds, or until the work is void; void work may or may not have been done in part.
class Delay {
 public:
  explicit Delay(uint64_t seed) : random_(seed) {}

  bool pass(const Cancelled& cancelled) {
    const auto end = Clock::now() + std::chrono::microseconds(chance(random_, 20) ? 0 : between(random_, 0, 200));
    do {
      if (cancelled && cancelled()) return false;
      std::this_thread::yield();
    } while (Clock::now() < end);
    return true;
  }
  bool works_in_vain() { return chance(random_, 50); }

 private:
  Random random_;
};

class SlowDraft final : public DraftStage {
 public:
  SlowDraft(DraftStage* stage, uint64_t seed) : stage_(stage), delay_(seed) {}
  bool step(const DraftStep& step, Draft* draft, const Cancelled& cancelled) override {
    const bool in_time = delay_.pass(cancelled);
    if (in_time || delay_.works_in_vain()) stage_->step(step, draft, cancelled);
    return in_time;
  }
  void export_hidden(Chunk* chunk) override { stage_->export_hidden(chunk); }

 private:
  DraftStage* stage_;
  Delay delay_;
};

class SlowVerify final : public VerifyStage {
 public:
  SlowVerify(VerifyStage* stage, uint64_t seed) : stage_(stage), delay_(seed) {}
  bool run(Chunk* chunk, const Cancelled& cancelled) override {
    const bool in_time = delay_.pass(cancelled);
    if (in_time || delay_.works_in_vain()) stage_->run(chunk, cancelled);
    return in_time;
  }
  std::vector<int> choose(const Chunk& chunk, int last) override { return stage_->choose(chunk, last); }

 private:
  VerifyStage* stage_;
  Delay delay_;
};

constexpr int kCapacity = 600;

// Some answers of one chain of stages, each of which may go on from the text of the one before.
int64_t answers_of_a_chain(uint64_t seed) {
  const std::string where = "threads carrier, seed " + std::to_string(seed);
  Random random(seed);
  const ToyModel model{seed, chance(random, 50) ? 1000 : 7};
  const std::vector<double> acceptance = {double(between(random, 0, 10)) / 10.0, double(between(random, 0, 10)) / 10.0};
  ToyDraft draft(model, kCapacity, acceptance, seed, double(between(random, 0, 2)) / 2.0);
  SlowDraft slow_draft(&draft, random());
  std::vector<std::unique_ptr<ToyVerify>> verify;
  std::vector<std::unique_ptr<SlowVerify>> slow_verify;
  Stages stages{&slow_draft, {}};
  const int count = between(random, 1, 4);
  for (int stage = 0; stage < count; ++stage) {
    verify.push_back(std::make_unique<ToyVerify>(model, kCapacity, stage));
    slow_verify.push_back(std::make_unique<SlowVerify>(verify.back().get(), random()));
    stages.verify.push_back(slow_verify.back().get());
  }

  int64_t rounds = 0;
  std::vector<int> text;
  for (int answer = 0; answer < 4; ++answer) {
    // A new turn: part of the old text, whose rows stay, and something new.
    const int keep = text.empty() ? 0 : between(random, 0, std::min(int(text.size()) - 1, kCapacity / 2));
    std::vector<int> prompt(text.begin(), text.begin() + keep);
    for (int extra = between(random, 1, 20); extra > 0; --extra) prompt.push_back(between(random, 0, 6));
    const int budget = between(random, 1, kCapacity - int(prompt.size()) - 1);
    Limits limits{int(prompt.size()) + std::min(budget, 150), {}};
    if (chance(random, 30)) limits.stop_ids = {between(random, 0, model.vocabulary - 1)};
    std::vector<int> plain = model.plain(prompt, limits.end - int(prompt.size()));
    const auto stop = std::find_if(plain.begin() + int(prompt.size()), plain.end(), [&](int id) {
      return std::find(limits.stop_ids.begin(), limits.stop_ids.end(), id) != limits.stop_ids.end();
    });
    if (stop != plain.end()) plain.erase(stop + 1, plain.end());

    const bool reports = chance(random, 50), changes = chance(random, 30), ends_early = chance(random, 10);
    Random later(random());
    const auto after_round = [&](const Round&, Scheduler* scheduler) {
      if (changes && chance(later, 20)) {
        Schedule schedule = random_schedule(later);
        schedule.overlap = true;
        scheduler->set_schedule(schedule);
      }
      return !(ends_early && chance(later, 5));
    };
    Threads carrier(stages, random_schedule(random), limits, random(), reports, nullptr, after_round);
    carrier.begin(prompt, keep);
    const bool interrupted = chance(random, 25);
    const auto patience = std::chrono::microseconds(between(random, 0, 4000));
    std::vector<int> known = prompt, drafted(kCapacity, -1);
    {
      const Helper interrupter([&] {
        if (!interrupted) return;
        std::this_thread::sleep_for(patience);
        carrier.cancel();
      });
      while (auto event = carrier.next()) {
        if (const Drafted* draft = std::get_if<Drafted>(&*event)) {
          drafted[draft->position] = draft->token;
          continue;
        }
        const Round& round = std::get<Round>(*event);
        for (int i = 0; reports && i < int(round.judged.size()); ++i)
          check(drafted[round.position + i] == round.judged[i].token, "a draft token is judged at another position", where);
        check_round(round, plain, &known, where);
        ++rounds;
      }
    }
    check(known == plain || interrupted || ends_early, "the answer is shorter than plain decoding's", where);
    check(known == carrier.tokens() || carrier.tokens().empty(), "the carrier's text is not what it reported", where);
    text = carrier.tokens();
  }
  return rounds;
}

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
  const auto share = [&](double part) {
    return begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds * part));
  };
  unpinned_threads_work();
  crowded_teams_shrink_and_grow();
  int64_t rounds = 0, chains = 0;
  for (; Clock::now() < share(0.4); ++chains) rounds += answers_of_a_chain(seed + uint64_t(chains));
  const auto until = [&](double part) {   // half of the tokens each
    return [end = share(part), tokens](const Played& played) { return Clock::now() >= end && 2 * played.tokens >= tokens; };
  };
  const Played lone = cpu_answers(until(0.7), seed), many = many_answers(until(1.0), seed);
  check(chains > 0, "too little time for anything", "stress");
  std::printf("stress: ok, %lld rounds of %lld chains of toy stages, %lld answers of the CPU library (%lld tokens), %lld of its "
              "loop (%lld), seed %llu\n",
              (long long)rounds, (long long)chains, (long long)lone.answers, (long long)lone.tokens, (long long)many.answers,
              (long long)many.tokens, (unsigned long long)seed);
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
