// Passes that leave the loop, for other ranks or for threads of their own. What they have chosen is committed when it comes back.
#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <utility>

#include "../loop/answer.h"

namespace ppsd {

using Clock = std::chrono::steady_clock;

size_t Loop::work(int32_t* out, int milliseconds) {
  if (!std::exchange(pinned_, true)) pin_caller();
  try {
    {
      const std::lock_guard<std::mutex> lock(stepping_);
      const bool stepped = step();
      if (const auto pass = chain_->take()) return write_pass(*pass, out);
      if (stepped) return 0;
    }
    condition_->wait_for(milliseconds);
  } catch (const std::bad_alloc&) {   // as in LoopThread; what is under way comes back to nobody
    const std::lock_guard<std::mutex> lock(stepping_);
    end_all(std::current_exception());
  }
  return 0;
}

bool Loop::draft_with(std::shared_ptr<const CpuModel> model) {
  const std::lock_guard<std::mutex> stepping(stepping_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!arrived_.empty() || !waiting_.empty() || !running_.empty()) return false;
  cpu_->draft_with(std::move(model));
  return true;
}

// In one process, whenever answers come and go: one alone overlaps if it wants to.
void Loop::turn_or_overlap() {
  if (!limits_.cuts) return;
  const bool wanted = running_.size() == 1 && waiting_.empty() && running_.front()->overlaps();
  if (wanted == overlapping()) return;
  if (wanted) {
    if (!threads_) {
      run_on(cores_);   // or the new ones would begin where this one is pinned
      threads_ = std::make_unique<StageThreads>(*cpu_, *limits_.cuts, cores_, blocks_, condition_);
      if (judged_) threads_->judge_by(judged_);
    }
    Answer& answer = *running_.front();
    answer.told = std::min(answer.rows, answer.verifying->known());   // what took turns has told its sampler more, or less
    chain_ = &threads_->chain();
    threads_->record(answer.request.trace);
    cpu_->use(&threads_->draft_team());
    threads_->draft_team().pin_caller();
  } else {
    settle();
    chain_ = nullptr;
    cpu_->use(nullptr);
    pin_caller();
    sweep(&running_);
  }
}

// In one process: until nothing is under way, so that the loop may change any block. What is void ends at the next layer.
void Loop::settle() {
  if (!overlapping()) return;
  for (;;) {
    if (!closed_.empty()) send({});
    if (flights_.empty()) return;
    if (const auto verdict = chain_->landed()) land(*verdict);
    else condition_->wait();
  }
}

// The rows in x_, to the next stage. Without any, it hears what is new.
void Loop::send(const std::vector<Part>& parts) {
  Pass pass;
  Blocks::Changes changes = blocks_.take_changes();
  pass.wiped.assign(changes.wiped.begin(), changes.wiped.end());
  pass.copies.assign(changes.copies.begin(), changes.copies.end());
  pass.closed.assign(closed_.begin(), closed_.end());
  closed_.clear();
  pass.wants_hidden = passes_.uses_feedback();
  Flight flight{0, parts, true, Clock::now()};
  for (Part& part : flight.parts) {
    Answer& answer = *part.answer;
    if (answer.number == 0) pass.opened.push_back({answer.number = ++numbers_, answer.settings, ranks_ ? nullptr : answer.verifying});
    const std::vector<int>& blocks = answer.table.numbers();
    PassPart& sent = pass.parts.emplace_back();
    part.chosen = part.chooses();
    sent = {answer.number, int32_t(part.epoch), part.start, part.rows, part.chosen, std::min(answer.told, part.start), {}, {}};
    const int end = part.start + part.rows;
    const auto text = answer.text().begin();
    if (sent.known < part.start) sent.ids.assign(text + sent.known, text + part.start);
    if (part.prompt) sent.ids.insert(sent.ids.end(), text + part.start, text + end);
    else sent.ids.insert(sent.ids.end(), part.ids.begin(), part.ids.end());
    sent.blocks.assign(blocks.begin(), blocks.begin() + (end + kSpan - 1) / kSpan);
    answer.told = end;
    flight.alone = flight.alone && answer.flying == 0;
    ++answer.flying;
    pass.traced = pass.traced || (ranks_ && answer.request.trace);
  }
  // Of drafts that leave one by one, a stage that is free takes all that have come, up to a chunk.
  if (flight.parts.size() == 1 && !flight.parts.front().prompt) {
    const Schedule& schedule = flight.parts.front().answer->scheduler.schedule();
    // The first row may be the newest token's, of which no draft is judged: an only stage that is free has verified all before it.
    const bool first = flight.alone || (overlapping() && chain_->stages() == 2);
    if (schedule.overlap) pass.limit = std::max(1, schedule.max_chunk + int(first));
  }
  pass.hidden.assign(x_.begin(), x_.begin() + ptrdiff_t(size_t(pass.rows()) * size_t(model().shape.hidden_size)));
  flight.number = chain_->send(std::move(pass));
  flights_.push_back(std::move(flight));
  if (!overlapping()) return;
  threads_->take(*chain_->take());
  ++counts_.overlapped;
}

void Loop::land_all() {
  while (const auto verdict = chain_->landed()) land(*verdict);
  sweep(&running_);
  show_counts();
}

// The oldest pass under way, with those that it has become one with.
Loop::Flight Loop::take_flight(uint64_t number) {
  Flight flight{};
  for (; flight.number < number; flights_.pop_front()) {
    if (flights_.empty()) throw std::runtime_error("a verdict came that nobody waits for");
    Flight& next = flights_.front();
    for (const Part& part : next.parts)
      if (part.answer != nullptr) --part.answer->flying;
    if (flight.number == 0) {
      flight = std::move(next);
      continue;
    }
    Part &last = flight.parts.front(), &more = next.parts.front();
    if (flight.parts.size() > 1 || next.parts.size() > 1 || more.start != last.start + last.rows)
      throw std::runtime_error("a verdict is on passes that cannot be one");
    last.rows += more.rows;
    last.chosen += more.chosen;
    flight.number = next.number;
  }
  return flight;
}

void Loop::land(const PassVerdict& verdict) {
  const Flight flight = take_flight(verdict.number);
  const auto dropped = [&](size_t p) {
    return std::find(verdict.dropped.begin(), verdict.dropped.end(), int32_t(p)) != verdict.dropped.end();
  };
  int rows = 0;
  size_t chosen = 0;
  for (size_t p = 0; p < flight.parts.size(); ++p)
    if (!dropped(p)) rows += flight.parts[p].rows, chosen += size_t(flight.parts[p].chosen);
  const size_t hidden = size_t(model().shape.hidden_size), width = passes_.tap_width();
  if (chosen != verdict.chosen.size() || (passes_.uses_feedback() && verdict.hidden.size() != chosen * hidden) ||
      verdict.tapped.size() != size_t(rows) * width)
    throw std::runtime_error("a verdict is on another pass than was sent");
  if (ranks_ && flight.alone && verdict.dropped.empty())   // else it may have waited for others of its own, or not gone all the way
    policy_.took(&PassTimes::late, rows, std::chrono::duration<double>(Clock::now() - flight.begun).count());
  size_t next = 0;
  const float* after = verdict.tapped.data();
  for (size_t p = 0; p < flight.parts.size(); ++p) {
    const Part& part = flight.parts[p];
    const size_t count = dropped(p) ? 0 : size_t(part.chosen), first = std::exchange(next, next + count);
    const float* taps = std::exchange(after, after + (dropped(p) ? 0 : size_t(part.rows) * width));
    const bool gone = part.answer == nullptr || part.answer->over || part.epoch != part.answer->scheduler.epoch();
    if (overlapping()) threads_->told(verdict, part.rows, gone);
    if (gone) continue;
    if (dropped(p)) throw std::runtime_error("a stage has dropped rows that are not void");
    std::exception_ptr failure;
    for (const auto& failed : verdict.failures) {
      if (size_t(failed.part) != p) continue;
      failure = failed.grammar ? std::make_exception_ptr(MaskFailed(failed.why))
                               : std::make_exception_ptr(std::runtime_error(failed.why));
    }
    std::vector<Logprobs> logprobs;
    if (part.answer->request.sampling.logprobs >= 0 && verdict.logprobs.size() == chosen)
      logprobs.assign(verdict.logprobs.begin() + ptrdiff_t(first), verdict.logprobs.begin() + ptrdiff_t(next));
    if (passes_.taps() > 0) tell_taps(part, taps);
    conclude(part, verdict.chosen.data() + first, verdict.hidden.data() + (passes_.uses_feedback() ? first * hidden : 0), failure,
             std::move(logprobs));
    // Else a stage would work on void rows, and take bandwidth from the draft step that it waits for.
    const Scheduler& scheduler = part.answer->scheduler;
    if (overlapping() && scheduler.epoch() != part.epoch)
      threads_->raise(part.answer->number, int(scheduler.epoch()));
  }
  hear_all();
}

// Has a verdict come that makes void what this answer, alone in the round, is drafting?
bool Loop::rejected(const Answer& answer) {
  if (!chain_ || answer.flying == 0) return false;
  auto flight = flights_.begin();
  return chain_->any([&](const PassVerdict& verdict) {
    while (flight != flights_.end() && flight->number < verdict.number) ++flight;   // that has become one with the next
    if (flight == flights_.end()) return false;
    const Flight& last = *flight++;
    const Part& part = last.parts.front();
    if (last.parts.size() > 1) return false;
    if (part.answer != &answer || part.prompt || part.epoch != answer.scheduler.epoch()) return false;
    const std::vector<int> chosen(verdict.chosen.begin(), verdict.chosen.end());
    return answer.scheduler.rejects(part.start + part.rows - int(chosen.size()), chosen);
  });
}

}  // namespace ppsd
