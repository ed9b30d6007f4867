// A round: rows for all that run, drafts side by side, and one pass that says what is committed.
//
// It owns the policy, which decides who drafts how much, and the rows of the round on their way through the early layers and the
// exit head. Who runs is Admission's business, how verified rows get to the late layers the Transport's, which concludes parts here.
#pragma once

#include "admission.h"

namespace ppsd {

class RoundRunner {
 public:
  // prompt_rows, prior: see LoopLimits.
  RoundRunner(ModelBackend* backend, Admission* admission, Transport* transport, LoopCounts* counts, int prompt_rows, double prior);

  bool play();   // false: there is nothing to do
  Policy& policy() { return policy_; }

  // -- for the transport --
  // What a pass has made of a part. chosen: after each row that chooses; hidden: likewise [chosen][hidden]; taps: of all rows,
  // [rows][taps][hidden], for a head that has taps.
  void conclude(const Part& part, const int* chosen, const float* hidden, const float* taps, const std::exception_ptr& failure,
                std::vector<Logprobs> logprobs);
  void hear_all();   // after all parts of a pass

 private:
  bool stages_idle() const { return admission_.running().size() < size_t(transport_.stages()); }   // would some be?
  bool choose(std::vector<Sequence*>* all);
  int plan(const std::vector<Sequence*>& all, bool others);
  bool room_to_write(Sequence& answer);
  int next_of_prompt(Sequence& answer, int most);
  bool draft(const std::vector<Sequence*>& writing);
  bool draw(const std::vector<Part>& parts, std::vector<ModelBackend::Draw>* draws);
  bool gather(const std::vector<Sequence*>& writing, const std::vector<Part>& prompts, std::vector<Part>* parts);
  void embed(const Part& part, std::vector<Part>* parts);
  bool run_early(const std::vector<Part>& parts);
  void commit(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs);
  void prompt_done(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs);
  void keep(Sequence& answer, int start);
  void hear(Sequence& answer, int start);

  ModelBackend& backend_;
  Admission& admission_;
  Transport& transport_;
  LoopCounts& counts_;
  const int prompt_rows_;
  Policy policy_;
  Cancelled cancelled_;              // where one answer has the round to itself, and nobody wants that any more
  std::vector<float> x_, early_x_;   // [kPassRows][hidden]
  int early_rows_ = 0;               // of early_x_, in use
  std::vector<Segment> heard_;       // verified rows that a head with a tap is to hear,
  std::vector<float> heard_x_, heard_taps_;   // and what they are: see ModelBackend::hear
  bool hears_prompts_ = false;       // some of these are of prompts
  double hearing_seconds_ = 0.0;     // of others, since the last draft step, to which they count
};

}  // namespace ppsd
