#include "loop.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>
#include <stdexcept>

#include "../cpu/cores.h"
#include "answer.h"

namespace ppsd {
namespace {

// Between two times at which consumers are woken; more for each answer. Where a consumer shares the cores with the work, each time
// costs the work 50 us, or 280 where the weights have pushed all of Python out of the caches. No reader sees the difference.
constexpr std::chrono::microseconds kFlush{25000}, kFlushOfEach{2500};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

}  // namespace

Loop::Loop(std::unique_ptr<Passes> passes, int blocks, LoopLimits limits, int ranks)
    : own_(std::move(passes)),
      passes_(*own_),
      cpu_(dynamic_cast<CpuPasses*>(own_.get())),
      blocks_(passes_.block_bytes(), blocks),
      limits_(std::move(limits)),
      x_(size_t(kPassRows) * passes_.model().shape.hidden_size),
      early_x_(x_.size()),
      policy_(passes_.drafts(), passes_.draft_share(), limits_.prior,
              passes_.model().eagle ? Policy::Stages::kNone : ranks > 0 ? Policy::Stages::kRanks : limits_.cuts ? Policy::Stages::kThreads : Policy::Stages::kNone),
      ranks_(ranks > 0 ? std::make_unique<Chain>(ranks, passes_.model().shape.hidden_size, passes_.taps(), condition_)
                       : nullptr),
      cores_(passes_.members() > 1 ? usable_cores().order : std::vector<int>()),   // one alone goes where there is room
      chain_(ranks_.get()) {
  policy_.know(limits_.learned);
  if (ranks_) blocks_.note_changes();
  else passes_.lie_in(&blocks_);
}

Loop::~Loop() { end_all(nullptr); }

std::shared_ptr<AnswerEvents> Loop::add(Request request, bool automatic, int grammar) {
  if (request.limits.end > capacity()) throw std::bad_alloc();
  auto answer = std::make_unique<Answer>(this, std::move(request), automatic, grammar);
  const auto out = answer->out;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived_.push_back(std::move(answer));
  }
  condition_->notify();
  return out;
}

LoopCounts Loop::counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return shown_;
}

int Loop::between_rounds(std::function<int(Blocks&)> work) {
  std::packaged_task<int(Blocks&)> task(std::move(work));
  auto done = task.get_future();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(task));
  }
  condition_->notify();
  return done.get();
}

void Loop::do_work() {
  decltype(work_) work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work.swap(work_);
  }
  for (auto& task : work) task(blocks_);
}

std::vector<double> Loop::learned() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return learned_;
}

std::string Loop::explain() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return explained_;
}

void Loop::end_all(const std::exception_ptr& failure) {
  do_work();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.splice(waiting_.end(), arrived_);
  }
  if (threads_) {   // which write into blocks, until they have ended
    threads_.reset();
    chain_ = nullptr;
    cpu_->use(nullptr);
    flights_.clear();
    closed_.clear();
  }
  for (Answers* answers : {&waiting_, &running_}) {
    for (auto& answer : *answers) {
      answer->out->finish(failure);
      forget(*answer);
    }
    answers->clear();
  }
}

// A round: rows for all that run, drafts side by side, and one pass that says what is committed.
bool Loop::step() {
  do_work();
  if (chain_) land_all();
  let_in();
  std::vector<Answer*> all, writing;
  std::vector<Part> prompts;
  const bool others = choose_answers(&all);
  if (all.empty()) return false;
  for (Answer* answer : all)
    if (answer->writing()) writing.push_back(answer);
  ++counts_.rounds;
  if (all.size() == 1) cancelled_ = [this, answer = all.front()] { return answer->out->cancelled() || rejected(*answer); };
  else cancelled_ = nullptr;

  const int writers = int(writing.size());
  int prompt_rows = 0;
  if (writers == 0) prompt_rows = others ? limits_.prompt_rows : kPassRows;
  else if (writers < int(all.size())) prompt_rows = std::min(std::max(limits_.prompt_rows, 2 * writers), kPassRows - writers);
  plan(writing, prompt_rows, int(all.size()) - writers, kPassRows - writers - prompt_rows);
  writing.clear();
  for (Answer* answer : all) {
    if (!answer->running) continue;   // it has made room for another one
    if (answer->writing()) {
      const int size = int(answer->text().size());
      if (!answer->table.reserve(size + answer->most)) {
        Schedule plain = answer->scheduler.schedule();
        plain.first_chunk = plain.max_chunk = plain.lookahead = plain.lookup = 0;
        plain.recycle = plain.overlap = false;
        set_schedule(*answer, plain);
      }
      if (make_room(*answer, size)) writing.push_back(answer);
      continue;
    }
    if (answer->flying == 0 && answer->rows % kSpan == 0) {   // another text may have come further
      const int most = shared_at_most(*answer, answer->rows_wanted() - int(!answer->begun));
      if (const int rows = answer->table.share(answer->text(), most); rows > answer->rows) answer->go_on_from(rows);
    }
    const int rows = std::min(prompt_rows, answer->rows_wanted() - answer->left);
    if (rows == 0 || !make_room(*answer, answer->left + rows)) continue;
    prompts.push_back({answer, answer->left, rows, true, {}});
    prompt_rows -= rows;
  }
  if (writing.empty() && prompts.empty() && !flights_.empty()) return false;   // until something lands
  play(writing, prompts);
  sweep(&running_);
  notify_consumers();
  show_counts();
  return true;
}

void Loop::show_counts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  shown_ = counts_;
}

void Loop::show_learned() {
  auto learned = policy_.learned();
  auto explained = policy_.explain();
  const std::lock_guard<std::mutex> lock(mutex_);
  learned_ = std::move(learned);
  explained_ = std::move(explained);
}

// Those that have rows in the round; false: no others write. Over ranks each of the passes that are under way has its share,
// but where stages would have nothing to do: there all that can go on are in the next pass.
bool Loop::choose_answers(std::vector<Answer*>* all) {
  const size_t share = chain_ ? (running_.size() + size_t(chain_->stages()) - 1) / size_t(chain_->stages()) : running_.size();
  const bool room = !chain_ || chain_->room(), idle = stages_idle();
  size_t words = 0, sharing = 0;
  bool others = false;
  for (auto& answer : running_) {
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
    if (chain_ && all->size() > 0 && words + answer->words() > kPassTables) continue;   // it has the next pass
    words += answer->words();
    sharing += answer->flying == 0;
    all->push_back(answer.get());
  }
  return others;
}

// What this leaves undone was cancelled, or has become void.
void Loop::play(const std::vector<Answer*>& writing, const std::vector<Part>& prompts) {
  std::vector<Part> parts;
  if (draft(writing) && gather(writing, prompts, &parts)) return verify(parts);
  for (Answer* answer : writing) answer->step = {};
}

// All together: each consumer that wakes takes a core from a member of the team, for which the others wait.
void Loop::notify_consumers() {
  const auto now = Clock::now();
  if (now - told_ < kFlush + (int(running_.size()) - 1) * kFlushOfEach) return;
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
      if (!limits_.keep.empty()) answer.out->kept = cpu_->kept(answer.table.pointers(), answer.rows);
      forget(answer);
      if (answer.running) settle();
      if (answer.failure) answer.table.wipe();   // NaNs must not reach the next owner
      else leave(answer);
      show_counts();   // whoever hears that it is over finds it counted
      show_learned();
      answer.out->finish(answer.failure);
      at = answers->erase(at);
    } else {
      ++at;
    }
  }
}

// What is under way of it is void, and other stages will hear that it is over.
void Loop::forget(const Answer& answer) {
  for (Flight& flight : flights_)
    for (Part& part : flight.parts)
      if (part.answer == &answer) part.answer = nullptr;
  if (answer.number != 0) closed_.push_back(answer.number);
}

void Loop::let_in() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& answer : arrived_) answer->arrival = ++arrivals_;
    waiting_.splice(waiting_.end(), arrived_);
  }
  sweep(&waiting_);
  sweep(&running_);
  turn_or_overlap();
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
    const auto slow = std::find_if(running_.begin(), running_.end(), [](const auto& a) { return a->out->full() && !a->flying; });
    if (slow == running_.end()) return;
    put_back(**slow);
  }
}

// Blocks for the text, those of others where it begins like them; and one for each of those that run, so that they need not
// make it leave again at once. There is one table of rotations.
bool Loop::admit(Answer& answer) {
  if (!running_.empty() && running_.front()->rotated_as != answer.rotated_as) return false;
  const int wanted = answer.rows_wanted();
  const int most = shared_at_most(answer, wanted - int(!answer.begun));
  answer.table.share(answer.text(), most);
  const int blocks = wanted / kSpan + 1 - answer.table.size();
  if (!running_.empty() && blocks_.available() < blocks + int(running_.size())) {
    answer.table.drop();
    return false;
  }
  answer.shared = answer.table.copy_rest(answer.text(), most);
  // An EAGLE-3 head's last row there has read the other text's next token.
  if (model().eagle && answer.shared % kSpan > 0) --answer.shared;
  answer.go_on_from(answer.shared);
  counts_.shared_rows += answer.shared;
  passes_.reserve(answer.request.limits.end, answer.rotated_as);
  answer.running = true;
  answer.out->begin(answer.shared);
  return true;
}

// Of the first `rows` rows of its text, those that texts share.
int Loop::shared_at_most(const Answer& answer, int rows) const {
  return passes_.decoded_rows_differ() ? std::min(rows, answer.prompt_rows) : rows;
}

// Its blocks are free, its tokens stay: its rows will be computed again, to the same bits.
void Loop::put_back(Answer& answer) {
  ++counts_.preempted;
  answer.table.drop();
  if (answer.begun) answer.scheduler.forget_drafts();   // of when it overlapped
  answer.go_on_from(0);
  answer.running = false;
  const auto here = std::find_if(running_.begin(), running_.end(), [&](const auto& a) { return a.get() == &answer; });
  const auto place = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& a) { return a->arrival > answer.arrival; });
  waiting_.splice(place, running_, here);
}

// Who gives its blocks to `other`: one that waits for its consumer, or else the youngest; null: that is `other` itself.
Loop::Answer* Loop::victim(const Answer& other) {
  Answer* youngest = nullptr;
  for (auto& answer : running_) {
    if (answer->flying) continue;
    if (answer.get() != &other && answer->out->full()) return answer.get();
    youngest = answer.get();
  }
  return youngest == &other ? nullptr : youngest;
}

bool Loop::make_room(Answer& answer, int rows) {
  while (!answer.table.reserve(rows)) {
    Answer* other = victim(answer);
    if (other == nullptr && !flights_.empty()) return false;   // what is under way may end, or give way
    put_back(other ? *other : answer);
    if (other == nullptr) return false;
  }
  return true;
}

void Loop::fail(Answer& answer, std::exception_ptr failure) {
  answer.over = true;
  answer.failure = std::move(failure);
}

// Its rows stay for texts that begin like its own.
void Loop::leave(Answer& answer) {
  if (!answer.running || answer.rows == 0) return;
  cut(answer, answer.rows);   // a pass may have been cancelled, or is under way
  catch_up(answer);
  if (model().eagle) {
    answer.eagle.know(answer.rows, answer.text().data() + answer.rows, int(answer.text().size()) - answer.rows);
    read_taps(answer);
  }
  answer.table.leave(answer.text(), shared_at_most(answer, answer.rows));
}

// -- a round -----------------------------------------------------------------------------------------------------------

// Sets the schedule of the round, and how many drafts there may be.
void Loop::set_schedule(Answer& answer, const Schedule& schedule) {
  answer.scheduler.set_schedule(schedule);
  const int to_end = answer.request.limits.end - int(answer.text().size());
  answer.most = std::max(std::min(std::max(schedule.max_chunk, schedule.lookahead), to_end), 0);
}

void Loop::plan(const std::vector<Answer*>& writing, int prompt_rows, int reading, int left) {
  std::vector<Policy::Writer> writers;
  for (Answer* answer : writing) writers.push_back({&answer->drafts, {}});
  if (chain_) policy_.times.sharers = std::min(chain_->stages(), int(running_.size()));
  const bool alone = chain_ ? running_.size() == 1 : writing.size() == 1 && reading == 0;
  // What an EAGLE-3 head drafts from has been verified.
  policy_.plan(&writers, {prompt_rows, reading, left, alone, stages_idle() && !model().eagle});
  for (size_t i = 0; i < writing.size(); ++i) set_schedule(*writing[i], writers[i].schedule);
}

// The answer's next draft step, if there is one. Steps that draw nothing stay in hand, for the pass that verifies.
void Loop::next_step(Answer& answer, std::vector<Answer*>* drawing) {
  if (answer.over || !answer.scheduler.may_step()) return;
  answer.step = answer.scheduler.next_step();
  if (answer.request.report_drafts)
    for (const Drafted& copy : copied_for(answer.step)) answer.put(copy);
  if (answer.step.draw) drawing->push_back(&answer);
}

// Rows into early_x_, as a part of the pass; false: the answer has failed.
bool Loop::embed_rows(const Part& part, const int* ids, std::vector<Part>* parts) {
  const size_t hidden = size_t(model().shape.hidden_size);
  check_bound(size_t(early_rows_) + size_t(part.rows), kPassRows, "rows");
  try {
    passes_.embed(ids, part.rows, early_x_.data() + size_t(early_rows_) * hidden);
    part.answer->feed_sampler(part.answer->drafting, part.start, ids, part.rows);
    if (model().eagle) part.answer->eagle.know(part.start, ids, part.rows);
  } catch (const std::runtime_error&) {
    fail(*part.answer, std::current_exception());
    return false;
  }
  parts->push_back(part);
  early_rows_ += part.rows;
  return true;
}

// The rows in early_x_ through the early layers; the answers keep what comes of them.
bool Loop::run_early(const std::vector<Part>& parts) {
  const size_t hidden = size_t(model().shape.hidden_size);
  std::vector<Segment> segments;
  for (const Part& part : parts)
    if (part.rows > 0) segments.push_back(part.segment());   // of a draft the row may have passed them before
  if (!segments.empty() && !passes_.early(segments, early_x_.data(), cancelled_)) return false;
  const float* x = early_x_.data();
  for (const Part& part : parts) {
    part.answer->exits.add(x, part.rows);
    x += size_t(part.rows) * hidden;
  }
  return true;
}

// Draft tokens of all answers, the first of each in one pass, then the second, and so on. False: cancelled.
bool Loop::draft(const std::vector<Answer*>& writing) {
  std::vector<Answer*> drawing;
  for (Answer* answer : writing)
    if (!answer->scheduler.schedule().overlap || !answer->scheduler.ready()) next_step(*answer, &drawing);
  while (!drawing.empty()) {
    early_rows_ = 0;
    std::vector<Part> parts;
    for (Answer* answer : drawing) {
      const DraftStep& step = answer->step;
      embed_rows({answer, step.start, int(step.ids.size()), false, {}}, step.ids.data(), &parts);
    }
    if (parts.empty()) return true;
    const Clock::time_point begun = Clock::now();
    std::vector<Passes::Draw> draws;
    if (!run_early(parts)) return false;
    // What the head's layers have to catch up with is no draft's price.
    const auto behind = [&](const Part& part) { return passes_.lags() && part.answer->headed + 1 < part.answer->exits.end(); };
    const bool late = std::any_of(parts.begin(), parts.end(), behind);
    if (!draw(parts, &draws)) return false;
    const double seconds = seconds_since(begun) + std::exchange(hearing_seconds_, 0.0);
    if (!overlapping() && !late) policy_.took(&PassTimes::draft, early_rows_, seconds);   // by one thread, beside the others
    std::vector<Answer*> more;
    for (size_t i = 0; i < parts.size(); ++i) {
      Answer& answer = *parts[i].answer;
      const DraftStep step = std::exchange(answer.step, {});
      const int position = draws[i].position();
      const Draft draft = answer.request.oracle.instead_of(draws[i].draft, position, model().shape.vocab_size);
      span(parts[i], "draft", kDraftTrack, begun);
      answer.scheduler.stepped(step, &draft);
      if (answer.request.report_drafts) answer.put(Drafted{position, draft.token});
      if (!answer.scheduler.schedule().overlap) next_step(answer, &more);
    }
    drawing = std::move(more);
  }
  return true;
}

// From the last row of each part, whose answer has the step in hand.
bool Loop::draw(const std::vector<Part>& parts, std::vector<Passes::Draw>* draws) {
  for (const Part& part : parts) {
    Answer& answer = *part.answer;
    answer.vocabulary.follow(answer.text());
    const int end = answer.exits.end(), first = passes_.lags() ? std::min(answer.headed, end - 1) : end - 1;
    draws->push_back({answer.segment(first, end - first), answer.exits.at(first), answer.step.feedback.get(), &answer.drafting, &answer.vocabulary,
                      &answer.eagle, {}, {}});
  }
  if (!passes_.draw(draws, cancelled_)) return false;
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].answer->headed = parts[i].answer->exits.end();
    if (!(*draws)[i].drawn.empty()) parts[i].answer->exits.drew((*draws)[i].position() - 1, std::move((*draws)[i].drawn));
  }
  return true;
}

// What is left to do before verification: rows that nothing is drawn from, and those of prompts. Into x_: all rows to
// verify. False: cancelled.
bool Loop::gather(const std::vector<Answer*>& writing, const std::vector<Part>& prompts, std::vector<Part>* parts) {
  const size_t hidden = size_t(model().shape.hidden_size);
  early_rows_ = 0;
  std::vector<Part> early;
  for (Answer* answer : writing) {
    const DraftStep& step = answer->step;
    if (!answer->over && !step.ids.empty())
      embed_rows({answer, step.start, int(step.ids.size()), false, {}}, step.ids.data(), &early);
  }
  for (const Part& part : prompts) embed_rows(part, part.answer->text().data() + part.start, &early);
  if (!early.empty()) {
    const Clock::time_point begun = Clock::now();
    if (!run_early(early)) return false;
    if (!overlapping()) policy_.took(&PassTimes::early, early_rows_, seconds_since(begun));
    for (const Part& part : early)
      if (!part.prompt || chain_) span(part, part.prompt ? "prompt" : "draft", kDraftTrack, begun);
  }

  float* to = x_.data();
  const auto move = [&](const float* rows, size_t count) {
    check_bound(size_t(to - x_.data()) / hidden + count, kPassRows, "rows");
    to = std::copy(rows, rows + count * hidden, to);
  };
  for (Answer* answer : writing) {
    if (answer->over) continue;
    if (!answer->step.ids.empty()) answer->scheduler.stepped(answer->step, nullptr);
    answer->step = {};
    if (chain_ && !answer->scheduler.ready()) continue;   // it drafts on
    const bool committed = !answer->scheduler.in_flight();   // one of the rows is the newest token's
    const Chunk chunk = answer->scheduler.launch();
    if (chunk.start + chunk.rows() > answer->exits.end()) throw std::logic_error("a pass has other rows than were drafted");
    move(answer->exits.at(chunk.start), size_t(chunk.rows()));
    if (!chain_) answer->feed_sampler(*answer->verifying, chunk.start, chunk.ids.data(), chunk.rows());
    parts->push_back({answer, chunk.start, chunk.rows(), false, chunk.ids, chunk.epoch});
    counts_.draft_rows += chunk.rows() - int(committed);
  }
  for (const Part& part : prompts) {
    if (part.answer->over) continue;
    move(part.answer->exits.at(part.start), size_t(part.rows));
    if (!chain_)
      part.answer->feed_sampler(*part.answer->verifying, part.start, part.answer->text().data() + part.start, part.rows);
    parts->push_back(part);
    parts->back().epoch = part.answer->scheduler.epoch();
    part.answer->left = part.start + part.rows;
    counts_.prompt_rows += part.rows;
  }
  return true;
}

// The rows in x_ through the other layers, and what they choose.
void Loop::verify(const std::vector<Part>& parts) {
  if (parts.empty()) return;
  if (chain_) return send(parts);
  const size_t hidden = size_t(model().shape.hidden_size);
  std::vector<Segment> segments;
  std::vector<Head::Row> choosing;
  const float* x = x_.data();
  int rows = 0;
  for (const Part& part : parts) {
    segments.push_back(part.segment());
    const int chooses = part.chooses();
    for (int r = part.rows - chooses; r < part.rows; ++r)
      choosing.push_back({x + size_t(r) * hidden, part.answer->verifying.get(), part.start + r + 1});
    x += size_t(part.rows) * hidden;
    rows += part.rows;
  }
  const Clock::time_point begun = Clock::now();
  const Passes::Chosen chosen = passes_.verify(segments, x_.data(), choosing, cancelled_);
  if (!chosen.done) return;
  policy_.took(&PassTimes::late, rows, chosen.late);
  if (!choosing.empty()) policy_.took(&PassTimes::choose, int(choosing.size()), chosen.choose);

  const int* next = chosen.ids.data();
  x = x_.data();
  int row = 0;
  for (const Part& part : parts) {
    if (passes_.taps() > 0) tell_taps(part, passes_.tapped(row));
    row += part.rows;
    const int chooses = part.chooses();
    const float* first = x + size_t(part.rows - chooses) * hidden;
    span(part, part.prompt ? "prompt" : "verify", kVerifyTrack, begun);
    const bool failed = std::find(next, next + chooses, Sampler::kNone) != next + chooses;
    conclude(part, next, first, failed ? failure_of(*part.answer) : nullptr, part.answer->verifying->take_logprobs());
    next += chooses;
    x += size_t(part.rows) * hidden;
  }
  hear_all();
}

// What a pass has made of a part. chosen: after each row that chooses; hidden: likewise [chosen][hidden].
void Loop::conclude(const Part& part, const int* chosen, const float* hidden, const std::exception_ptr& failure,
                    std::vector<Logprobs> logprobs) {
  counts_.rows += part.rows;
  if (failure) fail(*part.answer, failure);
  else if (part.prompt) prompt_done(part, chosen, hidden, std::move(logprobs));
  else commit(part, chosen, hidden, std::move(logprobs));
}

// What verified rows are at the head's taps, [rows][taps][hidden]. An EAGLE-3 head reads them when it drafts.
void Loop::tell_taps(const Part& part, const float* taps) {
  Answer& answer = *part.answer;
  answer.taps = taps;
  if (!model().eagle) return;
  if (answer.eagle.pending() + part.rows > kPassRows) read_taps(answer);
  answer.eagle.verified(part.start, part.rows, taps, passes_.tap_width());
}

void Loop::read_taps(Answer& answer) { passes_.read_taps(&answer.eagle, answer.table.pointers(), answer.table.size()); }

std::exception_ptr Loop::failure_of(const Answer& answer) const {
  if (const auto failure = passes_.failure(answer.verifying.get())) return failure;
  return std::make_exception_ptr(std::runtime_error(kNoNumber));
}

void Loop::commit(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs) {
  Answer& answer = *part.answer;
  Verdict verdict;
  verdict.epoch = part.epoch;
  verdict.start = part.start;
  verdict.true_ids.assign(chosen, chosen + part.rows);
  if (passes_.uses_feedback()) verdict.hidden = with_taps(answer, hidden, 0, part.rows);
  verdict.logprobs = std::move(logprobs);
  auto round = answer.scheduler.land(verdict);
  if (!round) throw std::logic_error("a verdict that nobody waits for");
  policy_.learn(&answer.drafts, *round, answer.scheduler.in_flight(), Clock::now());
  answer.rows = answer.rows_wanted();
  answer.put(std::move(*round));
  keep(answer, part.start);
}

// Rows of a text that is read, for the first time or again.
void Loop::prompt_done(const Part& part, const int* chosen, const float* hidden, std::vector<Logprobs> logprobs) {
  Answer& answer = *part.answer;
  answer.rows += part.rows;
  answer.out->read(answer.rows);
  keep(answer, part.start);
  if (answer.begun || answer.rows < answer.rows_wanted()) return;
  std::vector<float> last;
  if (passes_.uses_feedback()) last = with_taps(answer, hidden, part.rows - 1, 1);
  answer.begun = true;
  answer.put(answer.scheduler.begin(answer.request.prompt, answer.shared, *chosen, std::move(last), std::move(logprobs)));
}

// The rows [0, answer.rows) are verified, those from `start` on just now: whole blocks of them can be shared, once the
// head's layers have seen them.
void Loop::keep(Answer& answer, int start) {
  cut(answer, std::max({answer.rows, answer.left, answer.begun ? answer.scheduler.drafted_rows() : 0}));
  if (passes_.taps() > 0 && passes_.uses_feedback() && (answer.most > 0 || !answer.begun)) hear(answer, start);
  if (answer.rows / kSpan > answer.headed / kSpan) catch_up(answer);
  if (model().eagle && answer.rows / kSpan > start / kSpan) {
    const std::vector<int>& text = answer.text();
    answer.eagle.know(start, text.data() + start, int(text.size()) - start);
    read_taps(answer);
  }
  answer.exits.forget(std::min(answer.headed, answer.rows));
  answer.table.keep(answer.text(), shared_at_most(answer, answer.rows));
}

// [rows][hidden] after the last layer, and behind each, for a head with a tap, what the part's row `row` and those after it are there.
std::vector<float> Loop::with_taps(const Answer& answer, const float* hidden, int row, int rows) const {
  const size_t width = size_t(model().shape.hidden_size), behind = passes_.tap_width();
  std::vector<float> all;
  for (size_t r = 0; r < size_t(rows); ++r) {
    all.insert(all.end(), hidden + r * width, hidden + (r + 1) * width);
    const float* tapped = answer.taps + (size_t(row) + r) * behind;
    if (behind > 0) all.insert(all.end(), tapped, tapped + behind);
  }
  return all;
}

// The rows from `start` on are verified just now. They wait for hear_all, with those of other answers. While nothing is to be drafted they wait for catch_up.
void Loop::hear(Answer& answer, int start) {
  if (answer.headed < start) catch_up(answer);
  const int rows = answer.rows - start;
  const std::vector<float> x = answer.exits.drawn(start, rows);
  hears_prompts_ |= !answer.begun;
  heard_.push_back(answer.segment(start, rows));
  heard_x_.insert(heard_x_.end(), x.begin(), x.end());
  heard_taps_.insert(heard_taps_.end(), answer.taps, answer.taps + x.size());
  answer.headed = std::max(answer.headed, answer.rows);
  if (answer.rows / kSpan > start / kSpan) hear_all();   // that block may be others' from now on
}

void Loop::hear_all() {
  if (heard_.empty()) return;
  const Clock::time_point begun = Clock::now();
  passes_.hear(heard_, heard_x_.data(), heard_taps_.data());
  if (!std::exchange(hears_prompts_, false)) hearing_seconds_ += seconds_since(begun);
  heard_.clear(), heard_x_.clear(), heard_taps_.clear();
}

// What is known of rows from `end` on is void.
void Loop::cut(Answer& answer, int end) {
  answer.exits.cut(end);
  answer.headed = passes_.lags() ? std::min(answer.headed, end) : answer.rows;
}

// All its rows through the exit head's own layers.
void Loop::catch_up(Answer& answer) {
  if (answer.headed == answer.rows) return;
  passes_.catch_up(answer.segment(answer.headed, answer.rows - answer.headed), answer.exits.at(answer.headed));
  answer.headed = answer.rows;
}

// In the answer's timeline, if it has one: from `begun` to now.
void Loop::span(const Part& part, const char* name, int track, std::chrono::steady_clock::time_point begun) {
  if (Trace* trace = part.answer->request.trace.get()) trace->add(name, track, part.rows, begun, Clock::now());
}

}  // namespace ppsd
