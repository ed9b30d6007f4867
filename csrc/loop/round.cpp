#include "round.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace ppsd {
namespace {

using Clock = Trace::Clock;

Part part_of_step(Sequence* answer) {
  return {answer, answer->step.start, int(answer->step.ids.size()), false, answer->step.ids};
}

}  // namespace

RoundRunner::RoundRunner(ModelBackend* backend, Admission* admission, Transport* transport, LoopCounts* counts, int prompt_rows, double prior)
    : backend_(*backend),
      admission_(*admission),
      transport_(*transport),
      counts_(*counts),
      prompt_rows_(prompt_rows),
      policy_(backend_.drafts(), backend_.draft_share(), prior, transport_.may_overlap()),
      x_(size_t(kPassRows) * backend_.model().shape.hidden_size),
      early_x_(x_.size()) {}

bool RoundRunner::play() {
  std::vector<Sequence*> all, writing;
  std::vector<Part> prompts, parts;
  const bool others = choose(&all);
  if (all.empty()) return false;
  ++counts_.rounds;
  if (all.size() == 1) cancelled_ = [this, answer = all.front()] { return answer->out->cancelled() || transport_.rejected(*answer); };
  else cancelled_ = nullptr;
  int prompt_rows = plan(all, others);
  for (Sequence* answer : all) {
    if (!answer->running) continue;   // it has made room for another one
    if (answer->writing()) {
      if (room_to_write(*answer)) writing.push_back(answer);
    } else if (const int rows = next_of_prompt(*answer, prompt_rows); rows > 0) {
      prompts.push_back({answer, answer->left, rows, true, {}});
      prompt_rows -= rows;
    }
  }
  if (writing.empty() && prompts.empty() && transport_.in_flight()) return false;   // until something lands
  if (draft(writing) && gather(writing, prompts, &parts)) transport_.verify(parts, x_.data(), cancelled_);
  else for (Sequence* answer : writing) answer->step = {};   // what is left undone was cancelled, or has become void
  return true;
}

// Those that have rows in the round; false: no others write. Over ranks each of the passes that are under way has its share,
// but where stages would have nothing to do: there all that can go on are in the next pass.
bool RoundRunner::choose(std::vector<Sequence*>* all) {
  const size_t stages = size_t(transport_.stages()), share = (admission_.running().size() + stages - 1) / stages;
  const bool room = transport_.room(), idle = stages_idle();
  size_t words = 0, sharing = 0;
  bool others = false;
  for (const auto& answer : admission_.running()) {
    if (answer->flying > 0) {
      others = others || answer->writing();
      if (!idle || !answer->goes_on() || (!answer->writing() && !room)) continue;
    }
    if (answer->out->full()) {
      answer->out->pause();
      continue;
    }
    answer->out->go_on();
    if (answer->flying == 0 && (!(room || idle) || sharing == share)) continue;
    if (all->size() > 0 && words + answer->words() > transport_.most_words()) continue;   // it has the next pass
    words += answer->words();
    sharing += answer->flying == 0;
    all->push_back(answer.get());
  }
  return others;
}

// The schedules of those that write, and how many rows prompts may have.
int RoundRunner::plan(const std::vector<Sequence*>& all, bool others) {
  std::vector<Sequence*> writing;
  std::vector<Policy::Writer> writers;
  for (Sequence* answer : all) {
    if (!answer->writing()) continue;
    writing.push_back(answer);
    writers.push_back({&answer->drafts, {}});
  }
  const int count = int(writing.size()), reading = int(all.size()) - count, running = int(admission_.running().size());
  int prompt_rows = 0;
  if (count == 0) prompt_rows = others ? prompt_rows_ : kPassRows;
  else if (reading > 0) prompt_rows = std::min(std::max(prompt_rows_, 2 * count), kPassRows - count);
  policy_.times.sharers = std::min(transport_.stages(), running);
  const bool alone = transport_.sends() ? running == 1 : count == 1 && reading == 0;
  // What an EAGLE-3 head drafts from has been verified.
  policy_.plan(&writers, {prompt_rows, reading, kPassRows - count - prompt_rows, alone, stages_idle() && !backend_.model().eagle});
  for (size_t i = 0; i < writing.size(); ++i) writing[i]->set_schedule(writers[i].schedule);
  return prompt_rows;
}

// Blocks for its newest token's row and its drafts. Where there are none for drafts, it has none.
bool RoundRunner::room_to_write(Sequence& answer) {
  const int size = int(answer.text().size());
  if (!answer.table.reserve(size + answer.most)) {
    Schedule plain = answer.scheduler.schedule();
    plain.first_chunk = plain.max_chunk = plain.lookahead = plain.lookup = 0;
    plain.recycle = plain.overlap = false;
    answer.set_schedule(plain);
  }
  return admission_.make_room(answer, size);
}

// How many rows of its text are read in this round, at most `most`, with blocks for them.
int RoundRunner::next_of_prompt(Sequence& answer, int most) {
  if (answer.flying == 0 && answer.rows % kSpan == 0) {   // another text may have come further
    const int shared = answer.table.share(answer.text(), answer.shareable(answer.rows_wanted() - int(!answer.begun)));
    if (shared > answer.rows) answer.go_on_from(shared);
  }
  const int rows = std::min(most, answer.rows_wanted() - answer.left);
  return rows > 0 && admission_.make_room(answer, answer.left + rows) ? rows : 0;
}

// Draft tokens of all answers, the first of each in one pass, then the second, and so on. False: cancelled.
bool RoundRunner::draft(const std::vector<Sequence*>& writing) {
  std::vector<Sequence*> drawing;
  for (Sequence* answer : writing)
    if ((!answer->scheduler.schedule().overlap || !answer->scheduler.ready()) && answer->next_step()) drawing.push_back(answer);
  while (!drawing.empty()) {
    early_rows_ = 0;
    std::vector<Part> parts;
    for (Sequence* answer : drawing) embed(part_of_step(answer), &parts);
    if (parts.empty()) return true;
    const Clock::time_point begun = Clock::now();
    std::vector<ModelBackend::Draw> draws;
    if (!run_early(parts)) return false;
    // What the head's layers have to catch up with is no draft's price.
    const auto behind = [&](const Part& part) { return backend_.lags() && part.answer->headed + 1 < part.answer->exits.end(); };
    const bool late = std::any_of(parts.begin(), parts.end(), behind);
    if (!draw(parts, &draws)) return false;
    const double seconds = seconds_since(begun) + std::exchange(hearing_seconds_, 0.0);
    if (!transport_.drafts_beside() && !late) policy_.took(&PassTimes::draft, early_rows_, seconds);   // by one thread, beside the others
    std::vector<Sequence*> more;
    for (size_t i = 0; i < parts.size(); ++i) {
      Sequence& answer = *parts[i].answer;
      const DraftStep step = std::exchange(answer.step, {});
      const int position = draws[i].position();
      const Draft draft = answer.request.oracle.instead_of(draws[i].draft, position, backend_.model().shape.vocab_size);
      parts[i].span("draft", kDraftTrack, begun);
      answer.scheduler.stepped(step, &draft);
      if (answer.request.report_drafts) answer.put(Drafted{position, draft.token});
      if (!answer.scheduler.schedule().overlap && answer.next_step()) more.push_back(&answer);
    }
    drawing = std::move(more);
  }
  return true;
}

// From the last row of each part, whose answer has the step in hand.
bool RoundRunner::draw(const std::vector<Part>& parts, std::vector<ModelBackend::Draw>* draws) {
  for (const Part& part : parts) {
    Sequence& answer = *part.answer;
    answer.vocabulary.follow(answer.text());
    const int end = answer.exits.end(), first = backend_.lags() ? std::min(answer.headed, end - 1) : end - 1;
    draws->push_back({answer.segment(first, end - first), answer.exits.at(first), answer.step.feedback.get(), &answer.drafting,
                      &answer.vocabulary, &answer.eagle, {}, {}});
  }
  if (!backend_.draw(draws, cancelled_)) return false;
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].answer->headed = parts[i].answer->exits.end();
    if (!(*draws)[i].drawn.empty()) parts[i].answer->exits.drew((*draws)[i].position() - 1, std::move((*draws)[i].drawn));
  }
  return true;
}

// What is left to do before verification: rows that nothing is drawn from, and those of prompts. Into x_: all rows to
// verify. False: cancelled.
bool RoundRunner::gather(const std::vector<Sequence*>& writing, const std::vector<Part>& prompts, std::vector<Part>* parts) {
  const size_t hidden = size_t(backend_.model().shape.hidden_size);
  early_rows_ = 0;
  std::vector<Part> early;
  for (Sequence* answer : writing)
    if (!answer->over && !answer->step.ids.empty()) embed(part_of_step(answer), &early);
  for (const Part& part : prompts) embed(part, &early);
  if (!early.empty()) {
    const Clock::time_point begun = Clock::now();
    if (!run_early(early)) return false;
    if (!transport_.drafts_beside()) policy_.took(&PassTimes::early, early_rows_, seconds_since(begun));
    for (const Part& part : early)
      if (!part.prompt || transport_.sends()) part.span(part.prompt ? "prompt" : "draft", kDraftTrack, begun);
  }

  float* to = x_.data();
  const auto move = [&](const float* rows, size_t count) {
    check_bound(size_t(to - x_.data()) / hidden + count, kPassRows, "rows");
    to = std::copy(rows, rows + count * hidden, to);
  };
  for (Sequence* answer : writing) {
    if (answer->over) continue;
    if (!answer->step.ids.empty()) answer->scheduler.stepped(answer->step, nullptr);
    answer->step = {};
    if (transport_.sends() && !answer->scheduler.ready()) continue;   // it drafts on
    const bool committed = !answer->scheduler.in_flight();   // one of the rows is the newest token's
    const Chunk chunk = answer->scheduler.launch();
    if (chunk.start + chunk.rows() > answer->exits.end()) throw std::logic_error("a pass has other rows than were drafted");
    move(answer->exits.at(chunk.start), size_t(chunk.rows()));
    parts->push_back({answer, chunk.start, chunk.rows(), false, chunk.ids, chunk.epoch});
    counts_.draft_rows += chunk.rows() - int(committed);
  }
  for (const Part& part : prompts) {
    if (part.answer->over) continue;
    move(part.answer->exits.at(part.start), size_t(part.rows));
    parts->push_back(part);
    parts->back().epoch = part.answer->scheduler.epoch();
    part.answer->left = part.start + part.rows;
    counts_.prompt_rows += part.rows;
  }
  return true;
}

// Rows into early_x_, as a part of the pass; or the answer has failed.
void RoundRunner::embed(const Part& part, std::vector<Part>* parts) {
  const size_t hidden = size_t(backend_.model().shape.hidden_size);
  check_bound(size_t(early_rows_) + size_t(part.rows), kPassRows, "rows");
  try {
    backend_.embed(part.tokens(), part.rows, early_x_.data() + size_t(early_rows_) * hidden);
    part.answer->feed_sampler(part.answer->drafting, part.start, part.tokens(), part.rows);
    if (backend_.model().eagle) part.answer->eagle.know(part.start, part.tokens(), part.rows);
  } catch (const std::runtime_error&) {
    return part.answer->fail(std::current_exception());
  }
  parts->push_back(part);
  early_rows_ += part.rows;
}

// The rows in early_x_ through the early layers; the answers keep what comes of them.
bool RoundRunner::run_early(const std::vector<Part>& parts) {
  const size_t hidden = size_t(backend_.model().shape.hidden_size);
  std::vector<Segment> segments;
  for (const Part& part : parts)
    if (part.rows > 0) segments.push_back(part.segment());   // of a draft the row may have passed them before
  if (!segments.empty() && !backend_.early(segments, early_x_.data(), cancelled_)) return false;
  const float* x = early_x_.data();
  for (const Part& part : parts) {
    part.answer->exits.add(x, part.rows);
    x += size_t(part.rows) * hidden;
  }
  return true;
}

void RoundRunner::conclude(const Part& part, const int* chosen, const float* hidden, const float* taps, const std::exception_ptr& failure,
                           std::vector<Logprobs> logprobs) {
  Sequence& answer = *part.answer;
  answer.taps = taps;
  if (backend_.model().eagle) {   // which reads them when it drafts
    if (answer.eagle.pending() + part.rows > kPassRows) answer.read_taps();
    answer.eagle.verified(part.start, part.rows, taps, backend_.tap_width());
  }
  counts_.rows += part.rows;
  if (failure) answer.fail(failure);
  else if (part.prompt) prompt_done(part, chosen, hidden, std::move(logprobs));
  else commit(part, chosen, hidden, std::move(logprobs));
}

void RoundRunner::commit(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs) {
  Sequence& answer = *part.answer;
  Verdict verdict;
  verdict.epoch = part.epoch;
  verdict.start = part.start;
  verdict.true_ids.assign(chosen, chosen + part.rows);
  if (backend_.uses_feedback()) verdict.hidden = answer.with_taps(hidden, 0, part.rows);
  verdict.logprobs = std::move(logprobs);
  auto round = answer.scheduler.land(verdict);
  if (!round) throw std::logic_error("a verdict that nobody waits for");
  policy_.learn(&answer.drafts, *round, answer.scheduler.in_flight(), Clock::now());
  answer.rows = answer.rows_wanted();
  answer.put(std::move(*round));
  keep(answer, part.start);
}

// Rows of a text that is read, for the first time or again.
void RoundRunner::prompt_done(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs) {
  Sequence& answer = *part.answer;
  answer.rows += part.rows;
  answer.out->read(answer.rows);
  keep(answer, part.start);
  if (answer.begun || answer.rows < answer.rows_wanted()) return;
  std::vector<float> last;
  if (backend_.uses_feedback()) last = answer.with_taps(hidden, part.rows - 1, 1);
  answer.begun = true;
  answer.put(answer.scheduler.begin(answer.request.prompt, answer.shared, *chosen, std::move(last), std::move(logprobs)));
}

// The rows [0, answer.rows) are verified, those from `start` on just now: whole blocks of them can be shared, once the
// head's layers have seen them.
void RoundRunner::keep(Sequence& answer, int start) {
  answer.cut(std::max({answer.rows, answer.left, answer.begun ? answer.scheduler.drafted_rows() : 0}));
  if (backend_.taps() > 0 && backend_.uses_feedback() && (answer.most > 0 || !answer.begun)) hear(answer, start);
  if (answer.rows / kSpan > answer.headed / kSpan) answer.prefill_head();
  if (backend_.model().eagle && answer.rows / kSpan > start / kSpan) answer.read_taps_from(start);
  answer.exits.forget(std::min(answer.headed, answer.rows));
  answer.table.keep(answer.text(), answer.shareable(answer.rows));
}

// The rows from `start` on are verified just now. They wait for hear_all, with those of other answers. While nothing is to be
// drafted they wait for prefill_head.
void RoundRunner::hear(Sequence& answer, int start) {
  if (answer.headed < start) answer.prefill_head();
  const int rows = answer.rows - start;
  const std::vector<float> x = answer.exits.drawn(start, rows);
  hears_prompts_ |= !answer.begun;
  heard_.push_back(answer.segment(start, rows));
  heard_x_.insert(heard_x_.end(), x.begin(), x.end());
  heard_taps_.insert(heard_taps_.end(), answer.taps, answer.taps + x.size());
  answer.headed = std::max(answer.headed, answer.rows);
  if (answer.rows / kSpan > start / kSpan) hear_all();   // that block may be others' from now on
}

void RoundRunner::hear_all() {
  if (heard_.empty()) return;
  const Clock::time_point begun = Clock::now();
  backend_.hear(heard_, heard_x_.data(), heard_taps_.data());
  if (!std::exchange(hears_prompts_, false)) hearing_seconds_ += seconds_since(begun);
  heard_.clear(), heard_x_.clear(), heard_taps_.clear();
}

}  // namespace ppsd
