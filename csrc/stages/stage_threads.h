// The late layers on threads of their own, for one answer whose stages overlap in one process.
//
// Each verification stage has a team, and a StageInbox as a rank has; here the wire is a function call. Their layers lie in the
// loop's blocks, where the loop's own passes find them too. The threads wait for passes, and take no time while there are none.
#pragma once

#include <memory>
#include <vector>

#include "../core/trace.h"
#include "chain.h"
#include "../loop/cpu_passes.h"
#include "pass_stage.h"
#include "stage_inbox.h"

namespace ppsd {

class StageThreads {
 public:
  // passes: of the whole model. The late layers are cut at `cuts`. cores: that are usable, best first.
  // Throws NoThread; std::invalid_argument where cuts do not rise from the exit layer to the last one.
  StageThreads(const CpuPasses& passes, std::vector<int> cuts, const std::vector<int>& cores, const Blocks& blocks,
               std::shared_ptr<Condition> condition);
  ~StageThreads();   // what they are at ends at the next layer

  Chain& chain() { return chain_; }
  Team& draft_team() { return draft_team_; }   // of the thread that drafts meanwhile
  void take(PassMessage pass);                        // that is to leave
  void raise(int answer, int epoch);   // to all of them, see StageInbox
  // While nothing is under way: what stages do goes into this timeline, or null.
  void record(std::shared_ptr<Trace> trace) { trace_ = std::move(trace); }
  void told(const PassVerdict& verdict, int rows, bool gone);   // the last stage's work: was it for nothing?

 private:
  struct Stage;
  void work(Stage* stage, Stage* next, int track);   // by its thread; next: null, of the last one

  Chain chain_;
  Team draft_team_;
  std::shared_ptr<Trace> trace_;
  std::vector<std::unique_ptr<Stage>> stages_;
};

}  // namespace ppsd
