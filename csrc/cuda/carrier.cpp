#include "carrier.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "../core/thread.h"

namespace ppsd::cuda {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kLook = 5ms;        // between two looks at the streams while nothing comes
constexpr auto kSilence = 500ms;   // a pass that has ended must have left its record by then
constexpr int kMailSlots = 8;      // passes that may be between two stages: a twin of triton_kernels/state.py

std::chrono::seconds patience() {
  const char* set = std::getenv("PPSD_CUDA_TIMEOUT");
  const long seconds = set != nullptr ? std::strtol(set, nullptr, 10) : 0;
  return std::chrono::seconds(seconds > 0 ? seconds : 60);
}

// Waiting without taking a core for long: a record is looked for every few nanoseconds, then whenever the system lets
// us, then between short sleeps.
class Patience {
 public:
  void wait() {
    ++turns_;
    if (turns_ < spins()) spin_pause();
    else if (turns_ < spins() + 100) std::this_thread::yield();
    else std::this_thread::sleep_for(turns_ < spins() + 2000 ? 20us : 200us);
  }
  void reset() { turns_ = 0; }

 private:
  static int spins() {
    static const int count = std::thread::hardware_concurrency() > 2 ? 4000 : 200;
    return count;
  }
  int turns_ = 0;
};

}  // namespace

GraphCarrier::GraphCarrier(Lanes* lanes, Graphs graphs, const Schedule& schedule, const Limits& limits, uint64_t seed,
                           bool report_drafts, AfterRound after_round, Trace* trace, OwnedNgrams ngrams)
    : lanes_(lanes),
      graphs_(std::move(graphs)),
      plan_(schedule, limits, seed, std::min(graphs_.stages(), kMailSlots),
            graphs_.whole_rounds(), std::move(ngrams)),
      report_drafts_(report_drafts),
      one_device_(std::all_of(lanes->verify.begin(), lanes->verify.end(),
                              [&](const Lane& lane) { return lane.device == lanes->draft.device; })),
      after_round_(std::move(after_round)),
      trace_(trace),
      draft_streams_(Lanes::kDraftSlots, nullptr),
      pass_streams_(Lanes::kPassSlots, nullptr),
      drafts_before_(Lanes::kPassSlots, 0),
      drawing_(Lanes::kDraftSlots, -1) {}

GraphCarrier::~GraphCarrier() {
  try {
    drain();
  } catch (const DriverError&) {   // next() has told, or nobody wants to know
  }
  if (lost_) return;
  for (const Timed& timed : timed_)
    for (EventHandle event : {timed.begin, timed.end}) driver().cuEventDestroy(event);
  for (const auto& [device, event] : origins_) driver().cuEventDestroy(event);
}

void GraphCarrier::begin(const std::vector<int>& prompt, int keep, int first) {
  Round round = plan_.begin(prompt, keep, first);
  if (trace_ != nullptr) {
    for (const Lane& lane : lanes_->all()) {
      if (origin(lane.device) != nullptr) continue;
      origins_.emplace_back(lane.device, timer(lane));
      check(driver().cuEventRecord(origins_.back().second, lane.stream), "recording an event");
    }
  }
  if (after_round_) after_round_(round, &plan_);
  events_.emplace_back(std::move(round));
}

std::optional<Event> GraphCarrier::next() {
  Patience patience;
  const Clock::time_point since = Clock::now();
  Clock::time_point looked = since;
  std::optional<Clock::time_point> idle;   // since when the GPU was found to have nothing to do, look after look
  while (events_.empty()) {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (lost_) return std::nullopt;
    if (cancelled_.load(std::memory_order_relaxed)) plan_.cancel();
    try {
      if (plan_.finished()) {
        drain();
        return std::nullopt;
      }
      const bool collected = collect(), queued = queue();
      if (collected || queued) {
        patience.reset();
        idle.reset();
        continue;
      }
      patience.wait();
      if (const auto now = Clock::now(); now - looked > kLook) {
        looked = now;
        if (look_after(since)) idle.reset();
        else if (!idle) idle = now;   // by the next look, all that it had done until this one has been collected
        else if (now - *idle > kSilence)
          throw DriverError("the GPU has nothing left to do, but a verdict has not come");
      }
    } catch (...) {   // told after the events that there are already
      lost_ = true;
      failure_ = std::current_exception();
    }
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

// -- queueing ----------------------------------------------------------------------------------------------------------

bool GraphCarrier::queue() {
  bool queued = false;
  for (;;) {
    if (plan_.overlapping() || plan_.drafts_launched() - done_ > Lanes::kDraftSlots / 2) count_done();
    // A record must have been read before its place is needed again.
    if (graphs_.draft_records && drawn_ - read_ >= graphs_.drafts.slots() - kMaxChunk) return queued;
    if (plan_.drafts_launched() - done_ >= Lanes::kDraftSlots) return queued;
    const Step step = plan_.next(done_);
    if (const auto offer = plan_.take_offer()) write_offer(*offer, graphs_.offer);
    if (step.kind == Step::Kind::kWait) return queued;
    if (step.kind == Step::Kind::kRound) launch_round(step);
    else if (step.kind == Step::Kind::kVerify) launch_pass(step);
    else launch_draft(step);
    queued = true;
  }
}

void GraphCarrier::enter(const Lane& lane) {
  if (current_ == lane.context) return;
  check(driver().cuCtxSetCurrent(lane.context), "choosing the GPU");
  current_ = lane.context;
}

const Lane& GraphCarrier::draft_lane() const {
  return plan_.overlapping() ? lanes_->draft : lanes_->in_turns(lanes_->draft.device);
}

const Lane& GraphCarrier::pass_lane(int leg) const {
  const Lane& own = lanes_->verify[size_t(leg)];
  return plan_.overlapping() ? own : lanes_->in_turns(own.device);
}

// In the order of one stream there is nothing to wait for.
void GraphCarrier::wait_for(const Lane& lane, const Step& step) {
  const auto wait = [&](EventHandle event, Stream where) {
    if (where != nullptr && where != lane.stream)
      check(driver().cuStreamWaitEvent(lane.stream, event, 0), "ordering two streams");
  };
  if (step.after_draft >= 0)
    wait(lanes_->draft_done->at(step.after_draft), draft_streams_[size_t(step.after_draft % Lanes::kDraftSlots)]);
  if (step.after_pass >= 0)
    wait(lanes_->stage_done.back()->at(step.after_pass), pass_streams_[size_t(step.after_pass % Lanes::kPassSlots)]);
}

void GraphCarrier::launch_draft(const Step& step) {
  const bool row = step.kind == Step::Kind::kRow && graphs_.row != nullptr;
  const Lane& lane = draft_lane();
  const int64_t launch_number = plan_.drafts_launched() - 1;
  const size_t slot = size_t(launch_number % Lanes::kDraftSlots);
  enter(lane);
  wait_for(lane, step);
  launch(lane, row ? graphs_.row : graphs_.draft, row ? "row" : "draft", kDraftTrack, -1);
  draft_streams_[slot] = in_one_stream() ? nullptr : lane.stream;
  if (!in_one_stream()) check(driver().cuEventRecord(lanes_->draft_done->at(launch_number), lane.stream), "recording an event");
  if (!row) drawing_[size_t(drawn_++ % Lanes::kDraftSlots)] = launch_number;
}

void GraphCarrier::launch_pass(const Step& step) {
  const Driver& cu = driver();
  const int64_t pass = plan_.passes_launched() - 1;
  const int legs = int(graphs_.verify.size()), first = int(graphs_.take_apart), end = first + graphs_.stages();
  for (int leg = 0; leg < legs; ++leg) {
    const Lane& lane = pass_lane(leg);
    enter(lane);
    const auto wait_for_leg = [&](int other, int64_t its) {
      if (pass_lane(other).stream != lane.stream)
        check(cu.cuStreamWaitEvent(lane.stream, lanes_->stage_done[size_t(other)]->at(its), 0), "ordering two streams");
    };
    if (leg == 0) wait_for(lane, step);
    else wait_for_leg(leg - 1, pass);
    // Rows are taken when the first stage is free for them: whatever has been drafted until then comes along.
    if (leg < first && pass > 0) wait_for_leg(first, pass - 1);
    if (leg < int(graphs_.copies.size()))
      for (const Copy& what : graphs_.copies[size_t(leg)]) copy(lane, what, step);
    const char* name = leg < first ? "take" : leg < end ? "verify" : "verdict";
    launch(lane, graphs_.verify.at(size_t(leg)), name, kVerifyTrack + leg, pass);
    if (!in_one_stream()) check(cu.cuEventRecord(lanes_->stage_done[size_t(leg)]->at(pass), lane.stream), "recording an event");
    if (leg + 1 == legs) pass_streams_[size_t(pass % Lanes::kPassSlots)] = in_one_stream() ? nullptr : lane.stream;
  }
  drafts_before_[size_t(pass % Lanes::kPassSlots)] = in_one_stream() ? plan_.drafts_launched() : 0;
}

// Its draft steps come before its pass in the one stream that there is.
void GraphCarrier::launch_round(const Step& step) {
  const int64_t number = plan_.drafts_launched() - 1, pass = plan_.passes_launched() - 1;
  const Lane& lane = pass_lane(0);
  enter(lane);
  wait_for(lane, step);
  launch(lane, graphs_.rounds[size_t(step.drafts)], "verify", kVerifyTrack, pass);   // in a trace: as its pass
  draft_streams_[size_t(number % Lanes::kDraftSlots)] = pass_streams_[size_t(pass % Lanes::kPassSlots)] = nullptr;
  drafts_before_[size_t(pass % Lanes::kPassSlots)] = number + 1;
  for (int draft = 0; draft < step.drafts; ++draft) drawing_[size_t(drawn_++ % Lanes::kDraftSlots)] = number;
}

void GraphCarrier::copy(const Lane& lane, const Copy& what, const Step& step) {
  if (what.to_device == what.from_device) return;
  size_t skip = 0, bytes = what.row_bytes;
  if (what.rows > 0) {
    skip = size_t(step.first_row) * what.row_bytes;
    bytes = size_t(std::min(step.rows, what.rows - step.first_row)) * what.row_bytes;
  }
  check(driver().cuMemcpyPeerAsync(what.to + skip, lanes_->context(what.to_device), what.from + skip,
                                   lanes_->context(what.from_device), bytes, lane.stream),
        "copying between GPUs");
}

void GraphCarrier::launch(const Lane& lane, GraphExec exec, const char* name, int track, int64_t pass) {
  if (exec == nullptr) throw DriverError(std::string("there is no graph for a ") + name + " step");
  if (trace_ == nullptr) return check(driver().cuGraphLaunch(exec, lane.stream), "launching a graph");
  const Timed timed{name, track, 1, pass, lane.device, timer(lane), timer(lane)};
  check(driver().cuEventRecord(timed.begin, lane.stream), "recording an event");
  check(driver().cuGraphLaunch(exec, lane.stream), "launching a graph");
  check(driver().cuEventRecord(timed.end, lane.stream), "recording an event");
  timed_.push_back(timed);
}

// -- collecting --------------------------------------------------------------------------------------------------------

bool GraphCarrier::collect() {
  bool any = false;
  while (collect_draft()) any = true;
  // What the rule is asked about is asked before the verdict on it is told.
  while (plan_.passes_in_flight() > 0) {
    const int32_t* words = graphs_.verdicts.find(int32_t(uint32_t(graphs_.sequence) + uint32_t(landed_) + 1));
    if (words == nullptr) break;
    ++landed_;
    take(record_of(words));
    any = true;
    if (plan_.finished()) break;
  }
  return any;
}

bool GraphCarrier::collect_draft() {
  bool any = false;
  if (graphs_.draft_records && read_ < drawn_) {
    if (const int32_t* words = graphs_.drafts.find(int32_t(uint32_t(graphs_.drawn) + uint32_t(read_) + 1))) {
      const int position = words[record::kDraftPosition];
      const bool drawn = position >= 0;
      const Draft draft{words[record::kDraftToken], float_of(words[record::kDraftConfidence])};
      told_.push_back({drawing_[size_t(read_ % Lanes::kDraftSlots)], drawn ? std::optional<Draft>(draft) : std::nullopt, position});
      if (drawn && report_drafts_) events_.emplace_back(Drafted{position, words[record::kDraftToken]});
      ++read_;
      any = true;
    }
  }
  const int64_t wanted = plan_.wants_confidence();
  if (wanted >= 0 && !graphs_.draft_records) {   // a rule that has nothing to go by
    plan_.drafted(std::nullopt);
    return true;
  }
  while (!told_.empty() && told_.front().launch < wanted) told_.pop_front();
  if (wanted >= 0 && !told_.empty() && told_.front().launch == wanted) {
    plan_.drafted(told_.front().draft, told_.front().position);
    any = true;
  }
  if (told_.size() > size_t(Lanes::kDraftSlots)) told_.pop_front();   // nobody asks
  return any;
}

void GraphCarrier::take(const Record& record) {
  count_done();
  done_ = std::max(done_, drafts_before_[size_t((landed_ - 1) % Lanes::kPassSlots)]);
  if (trace_ != nullptr)
    for (Timed& timed : timed_)
      if (timed.pass == landed_ - 1) {
        timed.rows = record.rows;
        if (record.committed.empty() && std::string(timed.name) == "verify") timed.name = "dropped verify";
      }
  read_timers(false);
  std::optional<Round> round = plan_.land(record, done_);
  if (!round) return;
  if (after_round_) after_round_(*round, &plan_);
  events_.emplace_back(std::move(*round));
}

// How many draft launches have ended; they end in the order of their launches.
void GraphCarrier::count_done() {
  while (done_ < plan_.drafts_launched() && draft_streams_[size_t(done_ % Lanes::kDraftSlots)] != nullptr) {
    const Result result = driver().cuEventQuery(lanes_->draft_done->at(done_));
    if (result == kNotReady) return;
    check(result, "waiting for a draft step");
    ++done_;
  }
}

// While nothing comes: is the GPU still there, and at work?
bool GraphCarrier::look_after(Clock::time_point since) {
  bool busy = false;
  for (const Lane& lane : lanes_->all()) {
    enter(lane);
    const Result result = driver().cuStreamQuery(lane.stream);
    if (result == kNotReady) busy = true;
    else check(result, "waiting for the GPU");
  }
  if (Clock::now() - since > patience())
    throw DriverError("the GPU has not answered for " + std::to_string(patience().count()) +
                                          " seconds (PPSD_CUDA_TIMEOUT sets how long to wait)");
  return busy;
}

// Nothing of this answer runs any more when this returns; on a lost device that is so by itself.
void GraphCarrier::drain() {
  if (drained_ || lost_) return;
  drained_ = true;
  const Clock::time_point until = Clock::now() + patience();
  for (const Lane& lane : lanes_->all()) {
    Patience patience;
    for (;;) {
      enter(lane);
      const Result result = driver().cuStreamQuery(lane.stream);
      if (result == kSuccess) break;
      if (result != kNotReady) {
        lost_ = true;
        check(result, "waiting for the GPU");
      }
      if (Clock::now() > until) {
        lost_ = true;
        throw DriverError("the GPU does not end what it was doing");
      }
      patience.wait();
    }
  }
  read_timers(true);
}

// -- times -------------------------------------------------------------------------------------------------------------

EventHandle GraphCarrier::timer(const Lane& lane) {
  EventHandle event = nullptr;
  enter(lane);
  check(driver().cuEventCreate(&event, 0), "making an event");
  return event;
}

EventHandle GraphCarrier::origin(int device) const {
  for (const auto& [its, event] : origins_)
    if (its == device) return event;
  return nullptr;
}

// Spans of launches that have ended, counted from the answer's begin on their GPU.
void GraphCarrier::read_timers(bool all) {
  const Driver& cu = driver();
  while (!timed_.empty()) {
    const Timed& timed = timed_.front();
    if (!all && (timed.pass >= landed_ || cu.cuEventQuery(timed.end) != kSuccess)) return;
    float begin = 0.0f, end = 0.0f;
    const bool told = cu.cuEventElapsedTime(&begin, origin(timed.device), timed.begin) == kSuccess &&
                      cu.cuEventElapsedTime(&end, origin(timed.device), timed.end) == kSuccess;
    if (told) trace_->add({timed.name, timed.track, timed.rows, 1e3 * double(begin), 1e3 * double(end)});
    for (EventHandle event : {timed.begin, timed.end}) cu.cuEventDestroy(event);
    timed_.pop_front();
  }
}

}  // namespace ppsd::cuda
