#include "loop.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>
#include <stdexcept>

#include "../cpu/bounds.h"

namespace ppsd {
namespace {

constexpr double kHope = 0.6, kHopeWeight = 4.0;   // acceptance before anything is known, and the verdicts that it counts as
constexpr double kFades = 0.99;      // what verdicts weigh after each further one
constexpr double kPooled = 8.0;      // verdicts that those of all answers count as, for one of them
// A round with drafts takes longer than its passes say, and their rows are not there for prompts. Without a margin `auto`
// had 1.02, 0.93, 0.95, 0.89 of plain batching with 4, 8, 16, 32 clients; with this one 0.99, 0.98, 0.99, 0.96
// (benchmarks/results/2026-11-23-amd-epyc-load.json, and -before).
constexpr double kMargin = 2.0;
constexpr double kStake = 0.5;       // plain tokens that an answer's drafts may lose at once,
constexpr double kMayLose = 0.02;    // and in all, of its tokens
// Between two times at which consumers are woken: as in ../cpu/session.cpp, and more for each answer, for each takes Python's
// time then, which the team waits for.
constexpr std::chrono::microseconds kNews{25000}, kNewsOfEach{2500};
constexpr int kCopies = 6;           // copied drafts of a round, at the most
constexpr double kLeastChance = 0.1, kSureChance = 0.98;   // bounds of what a draft must promise

using Clock = std::chrono::steady_clock;

// Runs work(), a pass of so many rows.
template <class Work>
auto timed(PassTime* time, int rows, Work&& work) -> decltype(work()) {
  struct Stop {
    PassTime* time;
    int rows;
    Clock::time_point begun = Clock::now();
    ~Stop() { time->observe(rows, std::chrono::duration<double>(Clock::now() - begun).count()); }
  } stop{time, rows};
  return work();
}

// Drafting waits for nobody here, so nothing overlaps; and siblings are for an answer that has a pass to itself.
Schedule alone(Schedule schedule) {
  schedule.overlap = false;
  schedule.siblings = 0.0;
  schedule.max_chunk = std::min(schedule.max_chunk, kMaxChunk);
  schedule.lookahead = std::min(schedule.lookahead, schedule.max_chunk);
  schedule.first_chunk = schedule.lookahead;
  return schedule;
}

}  // namespace

struct Loop::Answer {
  Answer(Loop* loop, Request wanted, bool chosen, int said, double seconds)
      : request(std::move(wanted)),
        automatic(chosen),
        committed(said),
        out(std::make_shared<Outbox>(loop->bell_, seconds)),
        scheduler(alone(request.schedule), request.limits, request.sampling.seed),
        table(&loop->blocks_),
        drafting(*loop->model().kernels, loop->model().shape.vocab_size, loop->passes_.members()),
        verifying(*loop->model().kernels, loop->model().shape.vocab_size, loop->passes_.members()) {
    Sampling sampling = request.sampling;
    sampling.answer = int(request.prompt.size()) - committed - request.limits.own;
    sampling.stop_ids = request.limits.stop_ids;
    verifying.begin(sampling, 0);
    sampling.logprobs = -1;   // of drafts nobody asks
    sampling.mask = sampling.draft_mask;
    drafting.begin(sampling, 0);
    scheduler.recycle(request.successors);
    if (committed == 0) return;
    const std::vector<int> before(request.prompt.begin(), request.prompt.end() - 1);
    scheduler.begin(before, 0, request.prompt.back());
    begun = true;
  }

  // The sampler learns the text's rows from `start` on, and before these what it has not seen: rows of another answer.
  void tell(Sampler& sampler, int start, const int* ids, int count) const {
    const int known = sampler.known();
    if (known < start) sampler.know(known, text().data() + known, start - known);
    sampler.know(start, ids, count);
  }

  const std::vector<int>& text() const { return begun ? scheduler.tokens() : request.prompt; }
  // Rows of the text that must be there before it can go on: all but that of the newest token. A prompt's last row says what
  // the first token is.
  int rows_wanted() const { return int(text().size()) - int(begun); }
  // Plain tokens that its drafts may still lose.
  double earned() const { return balance + kStake + kMayLose * double(text().size() - request.prompt.size()); }
  bool writing() const { return begun && rows == rows_wanted(); }

  const Request request;
  const bool automatic;   // the loop decides on drafts
  const int committed;
  const std::shared_ptr<Outbox> out;
  Scheduler scheduler;
  BlockTable table;
  Sampler drafting, verifying;
  uint64_t arrival = 0;
  bool begun = false;         // the scheduler has the prompt and a token
  bool over = false, running = false;
  int rows = 0, shared = 0;   // verified, in the table; and of these, at first, another text's
  int drafts = 0;             // that the round at hand may have
  double accepted = 0.0, judged = 0.0;   // drafts of the exit head, older ones counting less
  double balance = 0.0;       // plain tokens that drafts have earned, more than they cost
  DraftStep step;             // in hand
  EagleText eagle;            // what an EAGLE-3 head knows of it
  std::vector<float> exits;   // [rows][hidden] of drafted rows that are not verified
};

// Rows of an answer in a pass, at positions [start, start + rows).
struct Loop::Part {
  Answer* answer;
  int start, rows;
  bool prompt;
};

Loop::Loop(std::shared_ptr<const CpuModel> model, int threads, size_t kv_bytes, LoopLimits limits)
    : passes_(std::move(model), threads),
      blocks_(passes_.block_bytes(), int(std::min(kv_bytes / passes_.block_bytes(), size_t(1) << 24))),
      limits_(limits) {
  const size_t floats = size_t(kPassRows) * this->model().shape.hidden_size;
  x_.resize(floats);
  early_x_.resize(floats);
  times_.draft_share = passes_.draft_share();
  times_.margin = kMargin;
}

Loop::~Loop() { end_all(nullptr); }

std::shared_ptr<Outbox> Loop::add(Request request, bool automatic, int committed, double seconds) {
  if (request.limits.end > capacity()) throw std::bad_alloc();
  auto answer = std::make_unique<Answer>(this, std::move(request), automatic, committed, seconds);
  const auto out = answer->out;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived_.push_back(std::move(answer));
  }
  bell_->ring();
  return out;
}

LoopCounts Loop::counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return shown_;
}

void Loop::learn(CpuEngine& engine) {
  std::vector<int> text = engine.tokens();
  text.push_back(0);
  int rows = engine.shared_rows(text);
  if (const EagleText* eagle = engine.draft().text()) rows = std::min(rows, eagle->sure());
  rows = rows / kSpan * kSpan;
  BlockTable table(&blocks_);
  if (rows > blocks_.available() * kSpan || !table.reserve(rows)) return;
  passes_.copy(engine, rows, table.pointers());
  table.keep(text, rows);
}

void Loop::end_all(std::exception_ptr failure) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.splice(waiting_.end(), arrived_);
  }
  for (Answers* answers : {&waiting_, &running_}) {
    for (auto& answer : *answers) answer->out->finish(failure);
    answers->clear();
  }
}

// A round: rows for all that run, drafts side by side, and one pass that says what is committed.
bool Loop::step() {
  let_in();
  std::vector<Answer*> all, writing;
  std::vector<Part> prompts;
  for (auto& answer : running_) {
    if (answer->out->full()) continue;
    all.push_back(answer.get());
    if (answer->writing()) writing.push_back(answer.get());
  }
  if (all.empty()) return false;
  ++counts_.rounds;

  const int writers = int(writing.size());
  int prompt_rows = 0;
  if (writers == 0) prompt_rows = kPassRows;
  else if (writers < int(all.size())) prompt_rows = std::min(std::max(limits_.prompt_rows, 2 * writers), kPassRows - writers);
  plan_drafts(writing, prompt_rows, int(all.size()) - writers, kPassRows - writers - prompt_rows);
  writing.clear();
  for (Answer* answer : all) {
    if (!answer->running) continue;   // it has made room for another one
    if (answer->writing()) {
      const int size = int(answer->text().size());
      if (!answer->table.reserve(size + answer->drafts)) {
        Schedule plain = answer->scheduler.schedule();
        plain.first_chunk = plain.max_chunk = plain.lookahead = plain.lookup = 0;
        plain.recycle = false;
        set_drafts(*answer, plain);
      }
      if (make_room(*answer, size)) writing.push_back(answer);
      continue;
    }
    if (answer->rows % kSpan == 0)   // another text may have come further
      answer->rows = answer->table.share(answer->text(), answer->rows_wanted() - int(!answer->begun));
    const int rows = std::min(prompt_rows, answer->rows_wanted() - answer->rows);
    if (rows == 0 || !make_room(*answer, answer->rows + rows)) continue;
    prompts.push_back({answer, answer->rows, rows, true});
    prompt_rows -= rows;
  }
  draft(writing);
  verify(gather(writing, prompts));
  sweep(&running_);
  tell();
  const std::lock_guard<std::mutex> lock(mutex_);
  shown_ = counts_;
  return true;
}

// All consumers together: each that wakes takes a core from a member of the team, for which the others wait.
void Loop::tell() {
  const auto now = std::chrono::steady_clock::now();
  if (now - told_ < kNews + (int(running_.size()) - 1) * kNewsOfEach) return;
  told_ = now;
  for (const Answers* answers : {&running_, &waiting_})
    for (const auto& answer : *answers) answer->out->tell();
}

// -- who runs ----------------------------------------------------------------------------------------------------------

void Loop::sweep(Answers* answers) {
  for (auto at = answers->begin(); at != answers->end();) {
    Answer& answer = **at;
    if (answer.begun && answer.scheduler.finished()) answer.over = true;
    if (answer.over || answer.out->cancelled()) {
      answer.out->finish();
      at = answers->erase(at);
    } else {
      ++at;
    }
  }
}

void Loop::let_in() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& answer : arrived_) answer->arrival = ++arrivals_;
    waiting_.splice(waiting_.end(), arrived_);
  }
  sweep(&waiting_);
  sweep(&running_);
  for (;;) {
    const auto next = std::find_if(waiting_.begin(), waiting_.end(), [](const auto& a) { return !a->out->full(); });
    if (next == waiting_.end()) return;
    if (int(running_.size()) < limits_.most_answers && admit(**next)) {
      const auto place = std::find_if(running_.begin(), running_.end(),
                                      [&](const auto& other) { return other->arrival > (*next)->arrival; });
      running_.splice(place, waiting_, next);
      continue;
    }
    // Answers whose consumers are slow keep nobody waiting.
    const auto slow = std::find_if(running_.begin(), running_.end(), [](const auto& a) { return a->out->full(); });
    if (slow == running_.end()) return;
    put_back(**slow);
  }
}

// Blocks for the text, those of others where it begins like them; and one for each of those that run, so that they need not
// make it leave again at once.
bool Loop::admit(Answer& answer) {
  const int wanted = answer.rows_wanted();
  answer.rows = answer.shared = answer.table.share(answer.text(), wanted - int(!answer.begun));
  const int blocks = wanted / kSpan + 1 - answer.table.size();
  if (!running_.empty() && blocks_.available() < blocks + int(running_.size())) {
    answer.table.drop();
    answer.rows = 0;
    return false;
  }
  counts_.shared_rows += answer.shared;
  passes_.reserve(answer.request.limits.end);
  answer.running = true;
  answer.out->begin();
  return true;
}

// Its blocks are free, its tokens stay: its rows will be computed again, to the same bits.
void Loop::put_back(Answer& answer) {
  ++counts_.preempted;
  answer.table.drop();
  answer.rows = 0;
  answer.running = false;
  const auto here = std::find_if(running_.begin(), running_.end(), [&](const auto& a) { return a.get() == &answer; });
  const auto place = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& a) { return a->arrival > answer.arrival; });
  waiting_.splice(place, running_, here);
}

// Who gives its blocks to `other`: one that waits for its consumer, or else the youngest; null: that is `other` itself.
Loop::Answer* Loop::victim(const Answer& other) {
  for (auto& answer : running_)
    if (answer.get() != &other && answer->out->full()) return answer.get();
  Answer* youngest = running_.back().get();
  return youngest == &other ? nullptr : youngest;
}

bool Loop::make_room(Answer& answer, int rows) {
  while (!answer.table.reserve(rows)) {
    Answer* other = victim(answer);
    put_back(other ? *other : answer);
    if (other == nullptr) return false;
  }
  return true;
}

void Loop::fail(Answer& answer, std::exception_ptr failure) {
  answer.over = true;
  answer.table.wipe();   // a number that is none would go on to whoever has these blocks next
  answer.out->finish(failure);
}

// -- a round -----------------------------------------------------------------------------------------------------------

// Sets the schedule of the round, and how many drafts there may be.
void Loop::set_drafts(Answer& answer, const Schedule& schedule) {
  answer.scheduler.set_schedule(schedule);
  const int to_end = answer.request.limits.end - int(answer.text().size());
  answer.drafts = std::max(std::min(schedule.max_chunk, to_end), 0);
}

// Which drafts each answer has. Those with a schedule get what it says, as long as rows are left; the others what pays.
void Loop::plan_drafts(const std::vector<Answer*>& writing, int prompt_rows, int reading, int left) {
  std::vector<Answer*> automatic;
  std::vector<double> acceptance;
  const double pooled = (kHope * kHopeWeight + accepted_) / (kHopeWeight + judged_);
  int others = prompt_rows, copying = 0, committed = 0;
  for (Answer* answer : writing) {
    if (answer->automatic) copying += answer->request.schedule.copies();
    if (answer->automatic && model().drafts() && answer->earned() > 0.0) {
      automatic.push_back(answer);
      acceptance.push_back((kPooled * pooled + answer->accepted) / (kPooled + answer->judged));
      continue;
    }
    ++others;
    ++committed;
    if (answer->automatic) continue;
    Schedule schedule = alone(answer->request.schedule);
    schedule.max_chunk = std::min(schedule.max_chunk, left);
    schedule.lookahead = std::min(schedule.lookahead, schedule.max_chunk);
    schedule.first_chunk = schedule.lookahead;
    if (schedule.max_chunk == 0) schedule.lookup = 0, schedule.recycle = false;
    set_drafts(*answer, schedule);
    left -= answer->drafts;
    others += answer->drafts;
  }
  allotment_ = allot(times_, acceptance, others, committed, left, kMaxChunk, reading);
  for (size_t i = 0; i < automatic.size(); ++i) left -= automatic[i]->drafts = allotment_.drafts[i];
  for (Answer* answer : writing) {
    if (!answer->automatic) continue;
    const bool drafts = std::find(automatic.begin(), automatic.end(), answer) != automatic.end();
    Schedule schedule;
    schedule.lookahead = schedule.first_chunk = drafts ? answer->drafts : 0;
    int copies = 0;
    if (answer->request.schedule.copies() && answer->earned() > 0.0 && allotment_.copies)
      copies = std::min({kCopies, left / copying--, kMaxChunk - schedule.lookahead});
    left -= copies;
    schedule.max_chunk = schedule.lookahead + copies;
    if (copies > 0) {
      schedule.lookup = answer->request.schedule.lookup;
      schedule.recycle = answer->request.schedule.recycle;
    }
    const auto worth = [&](double seconds) {
      return std::clamp(seconds * allotment_.tokens_per_second, kLeastChance, kSureChance);
    };
    schedule.stop_rule.kind = StopRule::Kind::kSurvival;
    schedule.stop_rule.threshold = worth(allotment_.draft_seconds);
    schedule.stop_rule.copy_threshold = worth(allotment_.row_seconds);
    set_drafts(*answer, schedule);
  }
}

// What the verdict says of drafts to come; and what those of the round have earned and cost.
void Loop::learn(Answer& answer, const Round& round) {
  for (int i = 0; i < int(round.judged.size()); ++i) {
    if (round.judged[i].copied > 0) continue;
    const double good = i < round.accepted ? 1.0 : 0.0;
    for (auto [accepted, judged] : {std::pair{&accepted_, &judged_}, std::pair{&answer.accepted, &answer.judged}}) {
      *accepted = kFades * *accepted + good;
      *judged = kFades * *judged + 1.0;
    }
  }
  const int drafts = int(round.judged.size()) + round.dropped, drawn = drafts - round.copied;
  const double seconds = drawn * allotment_.draft_seconds + round.copied * allotment_.row_seconds;
  answer.balance += round.accepted - seconds * allotment_.tokens_per_second;
  answer.balance = std::min(answer.balance, kStake);   // what a good passage has earned, a bad one may not lose
}

// The answer's next draft step, if there is one. Steps that draw nothing stay in hand, for the pass that verifies.
void Loop::next_step(Answer& answer, std::vector<Answer*>* drawing) {
  if (answer.over || !answer.scheduler.may_step()) return;
  answer.step = answer.scheduler.next_step();
  if (answer.request.report_drafts)
    for (const Drafted& copy : copied_for(answer.step)) answer.out->put(copy);
  if (answer.step.draw) drawing->push_back(&answer);
}

// Into early_x_, as a segment of the pass; false: the answer has failed.
bool Loop::embed_rows(Answer& answer, int start, const std::vector<int>& ids, std::vector<Segment>* segments) {
  const size_t hidden = size_t(model().shape.hidden_size);
  check_bound(size_t(early_rows_) + ids.size(), kPassRows, "rows");
  try {
    for (size_t r = 0; r < ids.size(); ++r) embed(model().embedding, ids[r], early_x_.data() + (early_rows_ + r) * hidden);
    answer.tell(answer.drafting, start, ids.data(), int(ids.size()));
    if (model().eagle) answer.eagle.know(start, ids.data(), int(ids.size()));
  } catch (const std::runtime_error&) {
    fail(answer, std::current_exception());
    return false;
  }
  segments->push_back({int(ids.size()), start, answer.table.pointers(), answer.table.size()});
  early_rows_ += int(ids.size());
  return true;
}

// Draft tokens of all answers, the first of each in one pass, then the second, and so on.
void Loop::draft(const std::vector<Answer*>& writing) {
  const size_t hidden = size_t(model().shape.hidden_size);
  std::vector<Answer*> drawing;
  for (Answer* answer : writing) next_step(*answer, &drawing);
  while (!drawing.empty()) {
    early_rows_ = 0;
    std::vector<Segment> segments;
    std::vector<Passes::Draw> draws;
    std::vector<Answer*> drawn, more;
    for (Answer* answer : drawing) {
      const DraftStep& step = answer->step;
      if (!embed_rows(*answer, step.start, step.ids, &segments)) continue;
      const int position = step.start + int(step.ids.size());
      draws.push_back({early_rows_ - 1, position, step.feedback.get(), &answer->drafting, {}, &answer->eagle,
                       answer->table.pointers(), answer->table.size()});
      drawn.push_back(answer);
    }
    if (drawn.empty()) return;
    timed(&times_.draft, early_rows_, [&] { passes_.early(segments, early_x_.data(), &draws); });
    for (size_t i = 0; i < drawn.size(); ++i) {
      Answer& answer = *drawn[i];
      const DraftStep step = std::move(answer.step);
      answer.step = {};
      const float* rows = early_x_.data() + (size_t(draws[i].row) + 1 - step.ids.size()) * hidden;
      answer.exits.insert(answer.exits.end(), rows, rows + step.ids.size() * hidden);
      answer.scheduler.stepped(step, &draws[i].draft);
      if (answer.request.report_drafts) answer.out->put(Drafted{draws[i].position, draws[i].draft.token});
      next_step(answer, &more);
    }
    drawing = std::move(more);
  }
}

// What is left to do before verification: rows that nothing is drawn from, and those of prompts. Into x_: all rows to verify.
std::vector<Loop::Part> Loop::gather(const std::vector<Answer*>& writing, const std::vector<Part>& prompts) {
  const size_t hidden = size_t(model().shape.hidden_size);
  early_rows_ = 0;
  std::vector<Segment> segments;
  for (Answer* answer : writing)
    if (!answer->over && !answer->step.ids.empty()) embed_rows(*answer, answer->step.start, answer->step.ids, &segments);
  for (const Part& part : prompts) {
    const auto first = part.answer->text().begin() + part.start;
    embed_rows(*part.answer, part.start, {first, first + part.rows}, &segments);
  }
  std::vector<Passes::Draw> none;
  if (early_rows_ > 0) timed(&times_.early, early_rows_, [&] { passes_.early(segments, early_x_.data(), &none); });

  std::vector<Part> parts;
  const float* from = early_x_.data();
  float* to = x_.data();
  const auto move = [&](const float* rows, size_t count) {
    check_bound(size_t(to - x_.data()) / hidden + count, kPassRows, "rows");
    to = std::copy(rows, rows + count * hidden, to);
  };
  for (Answer* answer : writing) {
    if (answer->over) continue;
    const size_t drafted = answer->exits.size() / hidden, rows = answer->step.ids.size();
    move(answer->exits.data(), drafted);
    move(from, rows);
    from += rows * hidden;
    answer->exits.clear();
    if (rows > 0) answer->scheduler.stepped(answer->step, nullptr);
    answer->step = {};
    const Chunk chunk = answer->scheduler.launch();
    if (chunk.ids.size() != drafted + rows) throw std::logic_error("a pass has other rows than were drafted");
    answer->tell(answer->verifying, chunk.start, chunk.ids.data(), chunk.rows());
    parts.push_back({answer, chunk.start, chunk.rows(), false});
    counts_.draft_rows += chunk.rows() - 1;
  }
  for (const Part& part : prompts) {
    if (part.answer->over) continue;
    move(from, size_t(part.rows));
    from += size_t(part.rows) * hidden;
    part.answer->tell(part.answer->verifying, part.start, part.answer->text().data() + part.start, part.rows);
    parts.push_back(part);
    counts_.prompt_rows += part.rows;
  }
  return parts;
}

// The rows in x_ through the other layers, and what they choose.
void Loop::verify(const std::vector<Part>& parts) {
  if (parts.empty()) return;
  const size_t hidden = size_t(model().shape.hidden_size);
  std::vector<Segment> segments;
  int rows = 0;
  for (const Part& part : parts) {
    segments.push_back({part.rows, part.start, part.answer->table.pointers(), part.answer->table.size()});
    rows += part.rows;
  }
  timed(&times_.late, rows, [&] { passes_.late(segments, x_.data()); });
  if (model().eagle) tell_eagle(parts);

  std::vector<Head::Row> choosing;
  const auto chooses = [](const Part& part) {   // how many of its rows, the last ones
    const bool first = part.prompt && !part.answer->begun && part.start + part.rows == part.answer->rows_wanted();
    return first ? 1 : part.prompt ? 0 : part.rows;
  };
  const float* x = x_.data();
  for (const Part& part : parts) {
    for (int r = part.rows - chooses(part); r < part.rows; ++r)
      choosing.push_back({x + size_t(r) * hidden, &part.answer->verifying, part.start + r + 1});
    x += size_t(part.rows) * hidden;
  }
  std::vector<int> chosen;
  if (!choosing.empty()) chosen = timed(&times_.choose, int(choosing.size()), [&] { return passes_.choose(choosing); });
  const int* next = chosen.data();
  x = x_.data();
  for (const Part& part : parts) {
    const int count = chooses(part);
    const float* last = x + size_t(part.rows - count) * hidden;
    counts_.rows += part.rows;
    if (std::find(next, next + count, Sampler::kNone) != next + count)
      fail(*part.answer, failure_of(*part.answer));
    else if (part.prompt) prompt_done(part, next, last);
    else commit(part, next, last);
    next += count;
    x += size_t(part.rows) * hidden;
  }
}

// What the rows of the pass are at the taps of an EAGLE-3 head, which reads them when it drafts.
void Loop::tell_eagle(const std::vector<Part>& parts) {
  int row = 0;
  for (const Part& part : parts) {
    Answer& answer = *part.answer;
    if (answer.eagle.pending() + part.rows > kPassRows) read_taps(answer);
    answer.eagle.verified(part.start, part.rows, passes_.tapped(row), passes_.tap_width());
    row += part.rows;
  }
}

void Loop::read_taps(Answer& answer) { passes_.catch_up(&answer.eagle, answer.table.pointers(), answer.table.size()); }

// The rows of an answer from `start` on are verified. Before a block of them can be another text's too, those of the head in
// it are computed.
void Loop::keep(Answer& answer, int start) {
  if (model().eagle && answer.rows / kSpan > start / kSpan) {
    const std::vector<int>& text = answer.text();
    answer.eagle.know(start, text.data() + start, int(text.size()) - start);
    read_taps(answer);
  }
  answer.table.keep(answer.text(), answer.rows);
}

std::exception_ptr Loop::failure_of(const Answer& answer) const {
  if (const auto failure = passes_.failure(&answer.verifying)) return failure;
  return std::make_exception_ptr(std::runtime_error(kNoNumber));
}

void Loop::commit(const Part& part, const int* chosen, const float* hidden) {
  Answer& answer = *part.answer;
  Verdict verdict;
  verdict.epoch = answer.scheduler.epoch();
  verdict.start = part.start;
  verdict.true_ids.assign(chosen, chosen + part.rows);
  if (passes_.hears()) verdict.hidden.assign(hidden, hidden + size_t(part.rows) * model().shape.hidden_size);
  verdict.logprobs = answer.verifying.take_logprobs();
  auto round = answer.scheduler.land(verdict);
  if (!round) throw std::logic_error("a verdict that nobody waits for");
  learn(answer, *round);
  answer.out->put(std::move(*round));
  answer.rows = answer.rows_wanted();
  keep(answer, part.start);
}

// Rows of a text that is read, for the first time or again.
void Loop::prompt_done(const Part& part, const int* chosen, const float* hidden) {
  Answer& answer = *part.answer;
  answer.rows += part.rows;
  keep(answer, part.start);
  if (answer.begun || answer.rows < answer.rows_wanted()) return;
  std::vector<float> last;
  if (passes_.hears()) last.assign(hidden, hidden + model().shape.hidden_size);
  answer.out->put(answer.scheduler.begin(answer.request.prompt, answer.shared, *chosen, std::move(last),
                                        answer.verifying.take_logprobs()));
  answer.begun = true;
}

}  // namespace ppsd
