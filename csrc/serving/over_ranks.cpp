// The loop of rank 0: its passes leave for other ranks, and what they have chosen is committed when it comes back.
#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <utility>

#include "answer.h"

namespace ppsd {

size_t Loop::work(int32_t* out, int milliseconds) {
  if (!std::exchange(pinned_, true)) pin_caller();
  try {
    const bool stepped = step();
    if (const size_t words = chain_->take(out)) return words;
    if (!stepped) bell_->wait_for(milliseconds);
  } catch (const std::bad_alloc&) {   // as in LoopThread; what is under way comes back to nobody
    end_all(std::current_exception());
  }
  return 0;
}

// The rows in x_, to the next rank.
void Loop::send(const std::vector<Part>& parts) {
  Pass pass;
  Blocks::Changes changes = blocks_.take_changes();
  pass.wiped.assign(changes.wiped.begin(), changes.wiped.end());
  pass.copies.assign(changes.copies.begin(), changes.copies.end());
  pass.closed.assign(closed_.begin(), closed_.end());
  closed_.clear();
  pass.wants_hidden = passes_.uses_feedback();
  for (const Part& part : parts) {
    Answer& answer = *part.answer;
    if (answer.number == 0) pass.opened.emplace_back(answer.number = ++numbers_, answer.settings);
    const std::vector<int>& blocks = answer.table.numbers();
    PassPart& sent = pass.parts.emplace_back();
    sent = {answer.number, part.start, part.rows, part.chooses(), std::min(answer.told, part.start), {}, {}};
    const int end = part.start + part.rows;
    const auto text = answer.text().begin();
    sent.ids.assign(text + sent.known, text + (part.prompt ? end : part.start));
    sent.ids.insert(sent.ids.end(), part.ids.begin(), part.ids.end());   // of a prompt: none
    sent.blocks.assign(blocks.begin(), blocks.begin() + (end + kSpan - 1) / kSpan);
    answer.told = end;
    answer.flying = true;
  }
  pass.hidden.assign(x_.begin(), x_.begin() + ptrdiff_t(size_t(pass.rows()) * size_t(model().shape.hidden_size)));
  chain_->send(std::move(pass));
  flights_.push_back({parts, std::chrono::steady_clock::now()});
}

void Loop::land_all() {
  while (const auto verdict = chain_->landed()) {
    if (lost_ > 0) --lost_;
    else land(*verdict);
  }
  sweep(&running_);
  show_counts();
}

void Loop::land(const PassVerdict& verdict) {
  if (flights_.empty()) throw std::runtime_error("a verdict came that nobody waits for");
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  int rows = 0;
  size_t chosen = 0;
  for (const Part& part : flight.parts) rows += part.rows, chosen += size_t(part.chooses());
  const size_t hidden = size_t(model().shape.hidden_size);
  if (chosen != verdict.chosen.size() || (passes_.uses_feedback() && verdict.hidden.size() != chosen * hidden))
    throw std::runtime_error("a verdict is on another pass than was sent");
  policy_.times.late.observe(rows, std::chrono::duration<double>(std::chrono::steady_clock::now() - flight.begun).count());
  size_t next = 0;
  for (size_t p = 0; p < flight.parts.size(); ++p) {
    const Part& part = flight.parts[p];
    const size_t count = size_t(part.chooses());
    part.answer->flying = false;
    span(part, part.prompt ? "prompt" : "verify", kVerifyTrack, flight.begun);
    std::exception_ptr failure;
    for (const auto& failed : verdict.failures) {
      if (size_t(failed.part) != p) continue;
      failure = failed.grammar ? std::make_exception_ptr(MaskFailed(failed.why))
                               : std::make_exception_ptr(std::runtime_error(failed.why));
    }
    std::vector<Logprobs> logprobs;
    if (part.answer->request.sampling.logprobs >= 0 && verdict.logprobs.size() == chosen)
      logprobs.assign(verdict.logprobs.begin() + ptrdiff_t(next), verdict.logprobs.begin() + ptrdiff_t(next + count));
    conclude(part, verdict.chosen.data() + next, verdict.hidden.data() + (passes_.uses_feedback() ? next * hidden : 0), failure,
             std::move(logprobs));
    next += count;
  }
}

}  // namespace ppsd
