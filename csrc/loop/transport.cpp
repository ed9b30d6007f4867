#include "transport.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "../cpu/cores.h"
#include "round.h"

namespace ppsd {

using Clock = Trace::Clock;

Transport::Transport(ModelBackend* backend, Blocks* blocks, RoundRunner* round, LoopCounts* counts, std::optional<std::vector<int>> cuts, int ranks,
                     std::shared_ptr<Condition> condition)
    : backend_(*backend),
      blocks_(*blocks),
      round_(*round),
      counts_(*counts),
      cuts_(std::move(cuts)),
      cores_(backend_.members() > 1 ? usable_cores().order : std::vector<int>()),   // one alone goes where there is room
      condition_(std::move(condition)),
      ranks_(ranks > 0 ? std::make_unique<Chain>(ranks, backend_.model().shape.hidden_size, backend_.taps(), condition_) : nullptr),
      way_(ranks > 0 ? Way::kRanks : Way::kNone) {
  if (ranks_) blocks_.note_changes();
  else backend_.lie_in(&blocks_);
}

bool Transport::overlap(Sequence* alone) {
  if (!cuts_ || (alone != nullptr) == (way_ == Way::kThreads)) return false;
  if (alone == nullptr) {
    drain();
    way_ = Way::kNone;
    cpu().use(nullptr);
    backend_.team().pin_caller();
    return true;
  }
  if (!threads_) {
    run_on(cores_);   // or the new ones would begin where this one is pinned
    threads_ = std::make_unique<StageThreads>(cpu(), *cuts_, cores_, blocks_, condition_);
  }
  way_ = Way::kThreads;
  alone->told = std::min(alone->rows, alone->verifying->known());   // what took turns has told its sampler more, or less
  threads_->record(alone->request.trace);
  cpu().use(&threads_->draft_team());
  threads_->draft_team().pin_caller();
  return false;
}

void Transport::close() {
  if (!threads_) return;
  threads_.reset();
  way_ = Way::kNone;
  cpu().use(nullptr);
  flights_.clear();
  closed_.clear();
}

void Transport::verify(const std::vector<Part>& parts, float* x, const Cancelled& cancelled) {
  if (parts.empty()) return;
  if (sends()) return send(parts, x);
  const size_t hidden = size_t(backend_.model().shape.hidden_size);
  std::vector<Segment> segments;
  std::vector<Head::Row> choosing;
  int rows = 0;
  for (const Part& part : parts) {
    Sampler& sampler = *part.answer->verifying;
    part.answer->feed_sampler(sampler, part.start, part.tokens(), part.rows);
    segments.push_back(part.segment());
    for (int r = part.rows - part.chooses(); r < part.rows; ++r)
      choosing.push_back({x + size_t(rows + r) * hidden, &sampler, part.start + r + 1});
    rows += part.rows;
  }
  const Clock::time_point begun = Clock::now();
  const ModelBackend::Chosen chosen = backend_.verify(segments, x, choosing, cancelled);
  if (!chosen.done) return;
  round_.policy().took(&PassTimes::late, rows, chosen.late);
  if (!choosing.empty()) round_.policy().took(&PassTimes::choose, int(choosing.size()), chosen.choose);

  const int* next = chosen.ids.data();
  int row = 0;
  for (const Part& part : parts) {
    Sampler& sampler = *part.answer->verifying;
    const int chooses = part.chooses();
    std::exception_ptr failure;
    if (std::find(next, next + chooses, Sampler::kNone) != next + chooses) {
      failure = backend_.failure(&sampler);
      if (!failure) failure = std::make_exception_ptr(std::runtime_error(kNoNumber));
    }
    part.span(part.prompt ? "prompt" : "verify", kVerifyTrack, begun);
    const float* taps = backend_.taps() > 0 ? backend_.tapped(row) : nullptr;
    row += part.rows;
    round_.conclude(part, next, x + size_t(row - chooses) * hidden, taps, failure, sampler.take_logprobs());
    next += chooses;
  }
  round_.hear_all();
}

// To the next stage. Without any parts, it hears what is new.
void Transport::send(const std::vector<Part>& parts, const float* x) {
  PassMessage pass;
  Blocks::Changes changes = blocks_.take_changes();
  pass.wiped = std::move(changes.wiped);
  pass.copies = std::move(changes.copies);
  pass.closed = std::exchange(closed_, {});
  pass.wants_hidden = backend_.uses_feedback();
  Flight flight{0, parts, true, Clock::now()};
  for (Part& part : flight.parts) {
    flight.alone = flight.alone && part.answer->flying == 0;
    pass.parts.push_back(part_to_send(&part, &pass));
  }
  // Of drafts that leave one by one, a stage that is free takes all that have come, up to a chunk.
  if (flight.parts.size() == 1 && !flight.parts.front().prompt) {
    const Schedule& schedule = flight.parts.front().answer->scheduler.schedule();
    // The first row may be the newest token's, of which no draft is judged: an only stage that is free has verified all before it.
    const bool first = flight.alone || (way_ == Way::kThreads && stages() == 2);
    if (schedule.overlap) pass.limit = std::max(1, schedule.max_chunk + int(first));
  }
  pass.hidden.assign(x, x + size_t(pass.rows()) * size_t(backend_.model().shape.hidden_size));
  flight.number = chain().send(std::move(pass));
  flights_.push_back(std::move(flight));
  if (way_ != Way::kThreads) return;
  threads_->take(*chain().take());
  ++counts_.overlapped;
}

PassPart Transport::part_to_send(Part* part, PassMessage* pass) {
  Sequence& answer = *part->answer;
  if (answer.number == 0) pass->opened.push_back({answer.number = ++numbers_, answer.settings, ranks_ ? nullptr : answer.verifying});
  pass->traced = pass->traced || (ranks_ && answer.request.trace);
  part->chosen = part->chooses();
  const int end = part->start + part->rows;
  const std::vector<int>& blocks = answer.table.numbers();
  PassPart sent{answer.number, int32_t(part->epoch), part->start, part->rows, part->chosen, std::min(answer.told, part->start), {}, {}};
  if (sent.known < part->start) sent.ids.assign(answer.text().begin() + sent.known, answer.text().begin() + part->start);
  sent.ids.insert(sent.ids.end(), part->tokens(), part->tokens() + part->rows);
  sent.blocks.assign(blocks.begin(), blocks.begin() + (end + kSpan - 1) / kSpan);
  answer.told = end;
  ++answer.flying;
  return sent;
}

bool Transport::land() {
  if (!sends()) return false;
  const size_t sent = flights_.size();
  while (const auto verdict = chain().landed()) conclude(*verdict);
  return flights_.size() < sent;
}

// In one process: until nothing is under way, so that the loop may change any block. What is void ends at the next layer.
void Transport::drain() {
  while (way_ == Way::kThreads) {
    if (!closed_.empty()) send({}, nullptr);
    if (flights_.empty()) return;
    if (const auto verdict = chain().landed()) conclude(*verdict);
    else condition_->wait();
  }
}

// Other stages will hear that it is over.
void Transport::drop(const Sequence& answer) {
  for (Flight& flight : flights_)
    for (Part& part : flight.parts)
      if (part.answer == &answer) part.answer = nullptr;
  if (answer.number != 0) closed_.push_back(answer.number);
  if (answer.running) drain();
}

// The oldest pass under way, with those that it has become one with.
Transport::Flight Transport::take_flight(uint64_t number) {
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

void Transport::conclude(const PassVerdict& verdict) {
  const Flight flight = take_flight(verdict.number);
  const auto dropped = [&](size_t p) {
    return std::find(verdict.dropped.begin(), verdict.dropped.end(), int32_t(p)) != verdict.dropped.end();
  };
  int rows = 0;
  size_t chosen = 0;
  for (size_t p = 0; p < flight.parts.size(); ++p)
    if (!dropped(p)) rows += flight.parts[p].rows, chosen += size_t(flight.parts[p].chosen);
  const size_t hidden = size_t(backend_.model().shape.hidden_size), width = backend_.tap_width();
  if (chosen != verdict.chosen.size() || (backend_.uses_feedback() && verdict.hidden.size() != chosen * hidden) ||
      verdict.tapped.size() != size_t(rows) * width)
    throw std::runtime_error("a verdict is on another pass than was sent");
  if (ranks_ && flight.alone && verdict.dropped.empty())   // else it may have waited for others of its own, or not gone all the way
    round_.policy().took(&PassTimes::late, rows, seconds_since(flight.begun));
  size_t next = 0;
  const float* after = verdict.tapped.data();
  for (size_t p = 0; p < flight.parts.size(); ++p) {
    const Part& part = flight.parts[p];
    const size_t count = dropped(p) ? 0 : size_t(part.chosen), first = std::exchange(next, next + count);
    const float* taps = std::exchange(after, after + (dropped(p) ? 0 : size_t(part.rows) * width));
    const bool gone = part.answer == nullptr || part.answer->over || part.epoch != part.answer->scheduler.epoch();
    if (way_ == Way::kThreads) threads_->told(verdict, part.rows, gone);
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
    round_.conclude(part, verdict.chosen.data() + first, verdict.hidden.data() + (backend_.uses_feedback() ? first * hidden : 0), taps,
                    failure, std::move(logprobs));
    // Else a stage would work on void rows, and take bandwidth from the draft step that it waits for.
    const Scheduler& scheduler = part.answer->scheduler;
    if (way_ == Way::kThreads && scheduler.epoch() != part.epoch)
      threads_->raise(part.answer->number, int(scheduler.epoch()));
  }
  round_.hear_all();
}

bool Transport::rejected(const Sequence& answer) {
  if (!sends() || answer.flying == 0) return false;
  auto flight = flights_.begin();
  return chain().any([&](const PassVerdict& verdict) {
    while (flight != flights_.end() && flight->number < verdict.number) ++flight;   // that has become one with the next
    if (flight == flights_.end()) return false;
    const Flight& last = *flight++;
    const Part& part = last.parts.front();
    if (last.parts.size() > 1) return false;
    if (part.answer != &answer || part.prompt || part.epoch != answer.scheduler.epoch()) return false;
    return answer.scheduler.rejects(part.start + part.rows - int(verdict.chosen.size()), verdict.chosen);
  });
}

}  // namespace ppsd
