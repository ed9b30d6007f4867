#include "carrier.h"

namespace ppsd {

int run_prompt(const Stages& stages, const std::vector<int>& prompt, int keep, const Cancelled& cancelled,
               std::vector<float>* last_hidden) {
  DraftStep step;
  step.start = keep;
  step.ids.assign(prompt.begin() + keep, prompt.end());
  if (!stages.draft->step(step, nullptr, cancelled)) return -1;
  Chunk chunk;
  chunk.start = keep;
  chunk.ids = step.ids;
  stages.draft->export_hidden(&chunk);
  for (VerifyStage* stage : stages.verify)
    if (!stage->run(&chunk, cancelled)) return -1;
  if (last_hidden != nullptr) *last_hidden = last_row(chunk);
  return stages.verify.back()->choose(chunk, 1).front();
}

std::vector<float> last_row(const Chunk& chunk) {
  const size_t width = chunk.hidden.size() / size_t(chunk.rows());
  return {chunk.hidden.end() - width, chunk.hidden.end()};
}

}  // namespace ppsd
