#include "stage_threads.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "../cpu/cores.h"

namespace ppsd {
namespace {

// Drafting has one thread, the others are dealt out to the verification stages.
int team_size(int threads, int stages, int stage) {
  const int spare = std::max(threads - 1, stages);
  return spare / stages + (stage < spare % stages);
}

}  // namespace

struct StageThreads::Stage {
  Stage(const CpuPasses& passes, int first, int last, int threads, std::vector<int> cores, size_t begin, const Blocks& blocks)
      : team(threads, std::move(cores)),
        slice(passes.model(), first, last, &team, 0, &blocks, begin, passes.model().taps()),
        inbox(
            [this, &passes](PassMessage* pass, const Cancelled& cancelled, PassVerdict* verdict) {
              return slice.run(pass, cancelled, verdict, passes.rope());
            },
            passes.model().shape.hidden_size, slice.last()) {
    team.judge_like(passes.team());
  }
  ~Stage() { end(); }
  void end() {   // of its thread
    inbox.close();
    if (thread) thread->join();
  }

  Team team;
  PassStage slice;
  StageInbox inbox;
  std::unique_ptr<Thread> thread;
};

StageThreads::StageThreads(const CpuPasses& passes, std::vector<int> cuts, const std::vector<int>& cores, const Blocks& blocks,
                           std::shared_ptr<Condition> condition)
    : chain_(int(cuts.size()) + 2, passes.model().shape.hidden_size, passes.taps(), std::move(condition)), draft_team_(1, cores_from(cores, 0, 1)) {
  const int threads = passes.members(), stages = int(cuts.size()) + 1;
  cuts.insert(cuts.begin(), passes.model().exit_layer);
  cuts.push_back(passes.model().shape.num_layers);
  if (std::adjacent_find(cuts.begin(), cuts.end(), std::greater_equal<>()) != cuts.end())   // layers would run twice, or not
    throw std::invalid_argument("the cuts of the late layers do not rise from the exit layer");
  size_t begin = passes.late_begin();
  int core = 1;
  for (int stage = 0; stage < stages; ++stage) {
    const int size = team_size(threads, stages, stage);
    stages_.push_back(std::make_unique<Stage>(passes, cuts[size_t(stage)], cuts[size_t(stage) + 1], size,
                                              cores_from(cores, core, size), begin, blocks));
    begin = stages_.back()->slice.end();
    core += size;
  }
  for (int number = 0; number < stages; ++number) {
    Stage* next = number + 1 < stages ? stages_[size_t(number) + 1].get() : nullptr;
    Stage* stage = stages_[size_t(number)].get();
    stage->thread = std::make_unique<Thread>([this, stage, next, number] { work(stage, next, kVerifyTrack + number); });
  }
}

StageThreads::~StageThreads() {   // the threads first, all of them: they hand on to each other
  for (auto& stage : stages_) stage->end();
}

void StageThreads::take(PassMessage pass) { stages_.front()->inbox.post(std::move(pass)); }

void StageThreads::raise(int answer, int epoch) {
  for (auto& stage : stages_) stage->inbox.raise(answer, epoch);
}

void StageThreads::told(const PassVerdict& verdict, int rows, bool gone) {
  if (trace_) trace_->add(gone ? "dropped verify" : "verify", kVerifyTrack + int(stages_.size()) - 1, rows, verdict.begun, verdict.ended);
}

void StageThreads::work(Stage* stage, Stage* next, int track) {
  stage->team.pin_caller();
  try {
    PassMessage pass;
    PassVerdict verdict;
    while (stage->inbox.work(&pass, &verdict)) {
      if (next == nullptr) {
        chain_.land(std::move(verdict));
        continue;
      }
      if (trace_) {
        const bool dropped = pass.rows() == 0;
        trace_->add(dropped ? "dropped verify" : "verify", track, pass.rows(), verdict.begun, verdict.ended);
      }
      next->inbox.post(std::move(pass));
    }
  } catch (...) {
    chain_.fail(std::current_exception());
  }
}

}  // namespace ppsd
