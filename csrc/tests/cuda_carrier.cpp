// The CUDA carrier on a driver without a GPU (fake_cuda.cpp), over toy stages, against plain decoding.
//
//     cuda_carrier SECONDS [SEED]
//
// Random schedules, stages, devices, delays and cancellations; then every way in which a driver can fail. Meant to run
// under the thread, address and undefined-behaviour sanitizers (`make sanitize`); prints one line.
#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <memory>

#include "../cuda/session.h"
#include "check.h"
#include "fake_cuda.h"
#include "toy_device.h"

namespace ppsd::test {
namespace {

using namespace ppsd::cuda;
using Clock = std::chrono::steady_clock;

constexpr int kCapacity = 700;
constexpr const char* kPatience = "600";   // seconds for a GPU whose threads may wait long for a core

// The fake's levers, out of the library that the driver is loaded from.
struct Levers {
  void* library = dlopen(PPSD_FAKE_CUDA, RTLD_NOW);
  template <class Function>
  Function* find(Function*, const char* name) {
    void* found = library != nullptr ? dlsym(library, name) : nullptr;
    check(found != nullptr, "the fake driver lacks a lever", name);
    return reinterpret_cast<Function*>(found);
  }
#define LEVER(name) decltype(&::name) name = find(&::name, #name)
  LEVER(fake_cuda_graph);
  LEVER(fake_cuda_fail);
  LEVER(fake_cuda_lose);
  LEVER(fake_cuda_stall);
  LEVER(fake_cuda_repair);
  LEVER(fake_cuda_streams);
  LEVER(fake_cuda_events);
  LEVER(fake_cuda_misuse);
  LEVER(fake_cuda_log);
  LEVER(fake_cuda_clear_log);
#undef LEVER
};

Levers& levers() {
  static Levers all;
  return all;
}

// A toy model on one or more devices, captured.
struct Captured {
  struct Stage {
    ToyDevice* device;
    int number;
    std::atomic<int> fails_after{-1};   // launches until one fails
    Stage(ToyDevice* its, int which) : device(its), number(which) {}
    int failing() { return fails_after >= 0 && fails_after-- == 0 ? 719 : 0; }
  };
  ToyModel model;
  ToyDevice device;
  std::vector<int> devices;   // of the stages
  static constexpr int kWhole = 4;   // drafts of the rounds that are captured as one graph, beside plain steps
  std::vector<std::unique_ptr<Stage>> stages;
  Graphs graphs;
  std::shared_ptr<Lanes> lanes;

  // on: the device of each verification stage.
  Captured(uint64_t seed, int vocabulary, std::vector<int> on, double acceptance, bool with_row, bool forgets = false)
      : model{seed, vocabulary, forgets}, device(model, kCapacity, on, acceptance, seed), devices(std::move(on)) {
    const auto graph = [&](FakeGraphRun run, int number) {
      stages.push_back(std::make_unique<Stage>(&device, number));
      return static_cast<GraphExec>(levers().fake_cuda_graph(run, stages.back().get()));
    };
    graphs.draft = graph([](void* data) { return static_cast<Stage*>(data)->device->draft_step(true); }, -1);
    if (std::count(devices.begin(), devices.end(), ToyDevice::kHome) == int(devices.size())) {
      graphs.rounds.resize(kWhole + 1);
      for (int drafts : {0, kWhole}) graphs.rounds[size_t(drafts)] = graph(round, drafts);
    }
    if (with_row) graphs.row = graph([](void* data) { return static_cast<Stage*>(data)->device->draft_step(false); }, -1);
    const int count = int(devices.size());
    graphs.take_apart = device.apart(0), graphs.verdict_apart = device.apart(count);
    std::vector<int> on_legs;
    const auto leg = [&](FakeGraphRun run, int number, int where) {
      graphs.verify.push_back(graph(run, number));
      graphs.copies.emplace_back();
      on_legs.push_back(where);
    };
    const auto copy = [&](ToyDevice::Ends ends, int from, size_t row_bytes, int rows) {
      graphs.copies.back().push_back({Address(ends.to), Address(ends.from), on_legs.back(), from, row_bytes, rows});
    };
    constexpr size_t kMailBytes = 4 * ToyDevice::kMail * ToyDevice::kMailWords;
    if (graphs.take_apart) leg([](void* data) { return static_cast<Stage*>(data)->device->take(); }, -1, ToyDevice::kHome);
    for (int number = 0; number < count; ++number) {
      leg(
          [](void* data) {
            auto* stage = static_cast<Stage*>(data);
            const int failure = stage->failing();
            return failure != 0 ? failure : stage->device->verify(stage->number);
          },
          number, device.device(number));
      if (!device.apart(number)) continue;
      copy(device.mail(number), device.device(number - 1), kMailBytes, 0);
      copy(device.rows(number), device.device(number - 1), 4, kCapacity);
      if (device.device(number) != ToyDevice::kHome) copy(device.epoch_on(device.device(number)), ToyDevice::kHome, 4, 0);
    }
    if (graphs.verdict_apart) {
      leg([](void* data) { return static_cast<Stage*>(data)->device->verdict(); }, -1, ToyDevice::kHome);
      copy(device.mail(count), device.device(count - 1), kMailBytes, 0);
    }
    graphs.verdicts = device.verdicts(), graphs.drafts = device.drafts();
    graphs.offer = device.offer();
    graphs.draft_records = true;
    lanes = std::make_shared<Lanes>(ToyDevice::kHome, on_legs);
  }

  static int round(void* data) {
    auto* stage = static_cast<Stage*>(data);
    for (int draft = 0; draft < stage->number; ++draft) stage->device->draft_step(true);
    stage->device->draft_step(false);
    for (int number = 0; number < stage->device->stages(); ++number) stage->device->verify(number);
    return stage->failing();
  }

  // As the backend does: the prompt, then one plain step for the first token.
  int begin(const std::vector<int>& prompt, const Limits& limits, const Schedule& schedule, bool planned) {
    device.begin(prompt, limits.end, planned ? kMaxChunk : schedule.max_chunk, planned ? kMaxChunk : schedule.lookahead, graphs.draft_records);
    device.draft_step(false);
    const auto hand = [&](size_t leg) {   // the copies, by hand
      for (const Copy& copy : graphs.copies[leg])
        std::memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from),
                    copy.row_bytes * size_t(std::max(1, copy.rows)));
    };
    if (graphs.take_apart) device.take();
    for (int stage = 0; stage < int(devices.size()); ++stage) {
      hand(size_t(stage) + graphs.take_apart);
      device.verify(stage);
    }
    if (graphs.verdict_apart) hand(graphs.verify.size() - 1), device.verdict();
    graphs.sequence = device.sequence(), graphs.drawn = device.drawn();
    return record_of(device.verdicts().find(device.sequence())).committed.front();
  }
};

Limits limits_of(Random& random, const std::vector<int>& prompt, int vocabulary, std::vector<int>* plain, const ToyModel& model) {
  const int budget = between(random, 1, std::min(150, kCapacity - int(prompt.size()) - 1));
  Limits limits{int(prompt.size()) + budget, {}};
  if (chance(random, 30)) limits.stop_ids = {between(random, 0, vocabulary - 1)};
  *plain = model.plain(prompt, budget);
  const auto stop = std::find_if(plain->begin() + long(prompt.size()), plain->end(), [&](int token) {
    return std::find(limits.stop_ids.begin(), limits.stop_ids.end(), token) != limits.stop_ids.end();
  });
  if (stop != plain->end()) plain->erase(stop + 1, plain->end());
  return limits;
}

std::shared_ptr<AlonePolicy> toy_policy(double prior, int lookup, bool recycle) {
  Schedule asked;
  asked.lookup = lookup, asked.recycle = recycle;
  auto policy = std::make_shared<AlonePolicy>(prior, true);
  policy->begin(asked, 0);
  return policy;
}

void expect_good_manners(const std::string& where) {
  const std::string misuse = levers().fake_cuda_misuse();
  check(misuse.empty(), misuse.c_str(), where);
}

// The answer's next event; false: it has ended.
bool next_event(GraphSession& session, Event* event) {
  double seconds = 0.0;
  for (;;) {
    const auto status = session.next(2000, event, &seconds);
    if (status != GraphSession::Status::kWaiting) return status == GraphSession::Status::kEvent;
  }
}

int64_t answers_of_a_model(uint64_t seed) {
  const std::string where = "cuda carrier, seed " + std::to_string(seed);
  Random random(seed);
  std::vector<int> devices(size_t(between(random, 1, 3)), 0);
  if (chance(random, 60))
    for (int& device : devices) device = between(random, 0, ToyDevice::kDevices - 1);
  Captured captured(seed, chance(random, 50) ? 1000 : 7, devices, double(between(random, 0, 10)) / 10.0, chance(random, 80),
                    chance(random, 50));
  captured.device.slow_down(chance(random, 70) ? 150 : 0, random());
  int64_t rounds = 0;
  const OwnedNgrams ngrams{std::make_shared<Ngrams>(size_t(1) << 20)};
  for (int answer = 0; answer < 4; ++answer) {
    std::vector<int> prompt, plain;
    for (int i = between(random, 1, 20); i > 0; --i) prompt.push_back(between(random, 0, 6));
    GraphRequest request;
    request.limits = limits_of(random, prompt, captured.model.vocabulary, &plain, captured.model);
    request.schedule = random_schedule(random);
    if (chance(random, 40)) request.schedule.stop_rule.kind = StopRule::Kind::kSurvival;
    request.schedule.recycle = request.schedule.max_chunk > 0 && chance(random, 30);
    if (chance(random, 25))
      request.policy = toy_policy(0.6, between(random, 0, 2), chance(random, 50));
    request.ngrams = ngrams;
    request.in_turns = chance(random, 20);
    request.seed = random();
    request.report_drafts = chance(random, 50);
    // Only these need the records of draft steps.
    const bool records = request.policy || request.report_drafts || request.schedule.stop_rule.kind != StopRule::Kind::kFixed;
    captured.graphs.draft_records = records || chance(random, 50);
    request.prompt = prompt;
    request.first = captured.begin(prompt, request.limits, request.schedule, bool(request.policy));
    const bool interrupted = chance(random, 25), traced = chance(random, 30);
    const auto patience = std::chrono::microseconds(between(random, 0, 4000));
    const bool reports = request.report_drafts;
    Trace trace;
    std::vector<int> known = prompt, drafted(kCapacity, -1);
    {
      GraphSession session(captured.lanes, captured.graphs, std::move(request), traced ? &trace : nullptr);
      const Helper interrupter([&] {
        if (!interrupted) return;
        std::this_thread::sleep_for(patience);
        session.end();
      });
      for (Event event; next_event(session, &event);) {
        if (const Drafted* draft = std::get_if<Drafted>(&event)) {
          drafted[size_t(draft->position)] = draft->token;
          continue;
        }
        const Round& round = std::get<Round>(event);
        check_round(round, plain, &known, where);
        check(reports || std::count(drafted.begin(), drafted.end(), -1) == kCapacity, "drafts were told of unasked", where);
        ++rounds;
      }
    }
    check(known == plain || interrupted, "the answer is shorter than plain decoding's", where);
    for (const Trace::Span& span : trace.spans())
      check(span.end_us >= span.begin_us && span.rows >= 0, "a span ends before it begins", where);
    check(!traced || interrupted || known.size() < prompt.size() + 3 || !trace.spans().empty(), "a trace without spans", where);
    expect_good_manners(where);
  }
  captured.lanes.reset();
  check(levers().fake_cuda_streams() == 0 && levers().fake_cuda_events() == 0, "streams or events were left behind", where);
  return rounds;
}

// An answer of so many tokens that is plain decoding's; each(round) sees its rounds.
template <class Each>
void plain_answer(Captured& captured, const Schedule& schedule, std::shared_ptr<AlonePolicy> policy, int tokens,
                  const std::string& where, Each&& each) {
  const std::vector<int> prompt = {3, 1, 2};
  GraphRequest request;
  request.prompt = prompt;
  request.limits.end = int(prompt.size()) + tokens;
  request.schedule = schedule;
  request.first = captured.begin(prompt, request.limits, schedule, bool(policy));
  request.policy = std::move(policy);
  const std::vector<int> plain = captured.model.plain(prompt, tokens);
  std::vector<int> known = prompt;
  GraphSession session(captured.lanes, captured.graphs, std::move(request), nullptr);
  for (Event event; next_event(session, &event);) {
    const Round& round = std::get<Round>(event);
    check_round(round, plain, &known, where);
    each(round);
  }
  check(known == plain, "the answer is shorter than plain decoding's", where);
  expect_good_manners(where);
}

// -- order -------------------------------------------------------------------------------------------------------------

// The calls of an answer of sixty tokens.
std::vector<FakeCudaCall> log_of(Captured& captured, const Schedule& schedule, const std::string& where) {
  levers().fake_cuda_clear_log();
  plain_answer(captured, schedule, nullptr, 60, where, [](const Round&) {});
  std::vector<FakeCudaCall> calls(100000);
  calls.resize(size_t(levers().fake_cuda_log(calls.data(), int(calls.size()))));
  return calls;
}

// Does the first leg of a pass begin without waiting for the last one of the pass before?
bool overtakes(const Captured& captured, const std::vector<FakeCudaCall>& calls) {
  const void *first = captured.graphs.verify.front(), *last = captured.graphs.verify.back();
  const void *recorded = nullptr, *launched = nullptr, *stream = nullptr;   // after the last leg; the newest launch
  bool waits = false;
  for (const FakeCudaCall& call : calls) {
    const std::string name = call.function;
    if (name == "cuGraphLaunch") {
      if (call.object == first && recorded != nullptr && !waits && stream != call.stream) return true;
      if (call.object == last) stream = call.stream;
      launched = call.object, waits = false;
    } else if (name == "cuEventRecord" && launched == last) {
      recorded = call.object;
    } else if (name == "cuStreamWaitEvent" && call.object == recorded) {
      waits = true;
    }
  }
  return false;
}

// Launches one after another on one stream have no events; with overlap, every pass waits for a draft step that has
// been queued before it, and every launch is followed by the record of an event that nobody has waited for before.
void calls_come_in_order() {
  const std::string where = "order of calls";
  Schedule turns, overlapped;
  turns.first_chunk = turns.max_chunk = turns.lookahead = 4;
  overlapped.first_chunk = 2, overlapped.max_chunk = 8, overlapped.lookahead = 15, overlapped.overlap = true;
  for (const std::vector<int>& devices : {std::vector<int>{0}, {0, 0}, {0, 1}, {1}, {1, 0}, {1, 1}}) {
    for (const Schedule& schedule : {turns, overlapped}) {
      Captured captured(7, 1000, devices, 0.7, true);
      const auto calls = log_of(captured, schedule, where);
      const void* draft_stream = nullptr;
      int passes = 0, drafts = 0, waits = 0, copies = 0;
      const void* waiting_stream = nullptr;
      const bool one_device = std::count(devices.begin(), devices.end(), ToyDevice::kHome) == int(devices.size());
      const bool one_stream = one_device && !schedule.overlap;
      for (size_t i = 0; i < calls.size(); ++i) {
        const FakeCudaCall& call = calls[i];
        const std::string name = call.function;
        if (name == "cuGraphLaunch") {
          const bool is_draft = call.object == captured.graphs.draft || call.object == captured.graphs.row;
          const bool is_round = one_device && call.object == captured.graphs.rounds[Captured::kWhole];
          (is_draft ? drafts : passes) += is_draft || is_round || call.object == captured.graphs.verify[0];
          if (is_round) drafts += Captured::kWhole;
          if (is_draft || is_round) draft_stream = call.stream;
          const bool recorded_next = i + 1 < calls.size() && std::string(calls[i + 1].function) == "cuEventRecord";
          check(one_stream ? !recorded_next : recorded_next && calls[i + 1].stream == call.stream,
                "a launch is followed by the record of its event, but where all are in one stream", where);
          if (schedule.overlap && call.object == captured.graphs.verify[0])
            check(waiting_stream == call.stream, "a pass does not wait for a draft step", where);
          if (call.object != captured.graphs.draft && call.object != captured.graphs.row) waiting_stream = nullptr;
        } else if (name == "cuStreamWaitEvent") {
          ++waits;
          waiting_stream = call.stream;
        } else {
          copies += name == "cuMemcpyPeerAsync";
        }
      }
      check(passes > 10 && drafts > 30, "too few launches for sixty tokens", where);
      if (!schedule.overlap && one_device) check(waits == 0, "launches in turns on one device need no events", where);
      if (schedule.overlap || !one_device) check(waits >= passes, "a pass that waits for nothing", where);
      check((copies > 0) == !one_device, "rows are copied between devices, and only there", where);
      if (schedule.overlap && devices.size() > 1)
        check(overtakes(captured, calls), "a pass waits for the verdict of the one before", where);
      check(draft_stream != nullptr, "no draft step was launched", where);
    }
  }
}

// What plain decoding and rounds of a fixed length cost the host: 59 tokens after the prompt's.
void launches_of_a_token() {
  const std::string where = "launches of a token";
  Schedule plain, fixed;
  fixed.first_chunk = fixed.max_chunk = fixed.lookahead = Captured::kWhole;
  struct Counts {
    int whole = 0, launches = 0, others = 0;
  };
  const auto count = [&](const Schedule& schedule, bool whole_rounds) {
    Captured captured(5, 1000, {0, 0}, 0.9, true);
    if (!whole_rounds) captured.graphs.rounds.clear();
    Counts counts;
    for (const FakeCudaCall& call : log_of(captured, schedule, where)) {
      const auto& rounds = captured.graphs.rounds;
      const bool launch = std::string(call.function) == "cuGraphLaunch";
      counts.launches += launch, counts.others += !launch;
      counts.whole += launch && std::find(rounds.begin(), rounds.end(), call.object) != rounds.end();
    }
    check(counts.others == 0, "one stream needs no events", where);
    return counts;
  };
  const Counts one = count(plain, true), apart = count(plain, false);
  check(one.whole == 59 && one.launches == 59, "a plain token is not one launch", where);
  check(apart.whole == 0 && apart.launches == 59 * 3, "its row, and two stages", where);
  const Counts rounds = count(fixed, true), steps = count(fixed, false);
  check(rounds.whole > 10 && steps.whole == 0 && steps.launches > 6 * rounds.whole, "a round is not one launch", where);
  // The last ones are shorter, and not captured: at most three are in flight.
  const int apart_at_most = 3 * (Captured::kWhole - 1 + 3);
  check(rounds.launches - rounds.whole <= apart_at_most, "more than the last rounds are apart", where);
}

// -- copies ------------------------------------------------------------------------------------------------------------

// No round is queued ahead while the text repeats itself: it would begin without the copies.
void copies_are_offered_before_their_round() {
  const std::string where = "offers of the plan";
  Schedule schedule;
  schedule.max_chunk = 7, schedule.lookup = 2;
  schedule.stop_rule.kind = StopRule::Kind::kSurvival;
  const auto kind = [](Plan* plan) { return plan->next(0).kind; };
  using Kind = Step::Kind;
  Plan plan(schedule, {100, {}}, 1, 1, 1);
  plan.begin({1, 2, 3, 1, 2, 3, 1, 2}, 0, 3);
  check(kind(&plan) == Kind::kRound, "a round is one launch", where);
  const auto offer = plan.take_offer();
  check(offer && offer->position == 9 && offer->most == 7 && offer->drafts.size() > 3, "what repeats itself is not offered", where);
  for (size_t i = 0; i < offer->drafts.size(); ++i)
    check(offer->drafts[i].token == int(i % 3) + 1 && offer->drafts[i].copied > 0, "another token is offered", where);
  check(kind(&plan) == Kind::kWait && !plan.take_offer(), "a round was queued ahead of its copies", where);
  Record record;
  record.position = 9, record.rows = 3, record.accepted = 1, record.copied = 2, record.committed = {1, 50}, record.judged = {offer->drafts[0], offer->drafts[1]};
  const auto round = plan.land(record, 1);
  check(round && round->copied == 2 && round->judged[0].copied > 0, "a copy is not told of", where);
  check(kind(&plan) == Kind::kRound, "the next round", where);
  const auto nothing = plan.take_offer();
  check(nothing && nothing->drafts.empty(), "an old offer is not taken back", where);
  check(kind(&plan) == Kind::kRound && kind(&plan) == Kind::kWait && !plan.take_offer(), "two rounds are queued where nothing repeats itself", where);
  record = {}, record.position = 11, record.rows = 1, record.committed = {1};
  plan.land(record, 2);
  record.position = 12, record.committed = {50};   // as it was said before
  plan.land(record, 3);
  check(kind(&plan) == Kind::kRound && plan.take_offer()->position == 13, "a passage that comes again is not offered", where);
  check(kind(&plan) == Kind::kWait, "a round was queued ahead of its copies", where);
}

constexpr int kTokens = 200;

// A text that repeats itself: what follows is copied, and accepted, and the answer is plain decoding's.
void copies_are_accepted() {
  Schedule alone, fixed, surviving, overlapped;
  alone.max_chunk = 7, alone.lookup = 2;
  alone.stop_rule.kind = StopRule::Kind::kSurvival;
  Schedule recycled = alone;
  recycled.lookup = 0, recycled.recycle = true;
  fixed.first_chunk = fixed.max_chunk = fixed.lookahead = Captured::kWhole, fixed.lookup = 2;
  surviving = fixed, surviving.stop_rule.kind = StopRule::Kind::kSurvival;
  overlapped.first_chunk = 2, overlapped.max_chunk = 8, overlapped.lookahead = 15, overlapped.overlap = true, overlapped.lookup = 2;
  const auto run = [&](const char* name, const Schedule& schedule, std::vector<int> devices, bool planned) {
    const std::string where = std::string("copies: ") + name;
    Captured captured(9, 30, std::move(devices), 0.5, true, true);
    int rounds = 0, copied = 0, accepted = 0, drawn = 0;
    plain_answer(captured, schedule, planned ? toy_policy(0.5, 2, false) : nullptr, kTokens, where, [&](const Round& round) {
      ++rounds;
      int here = 0;
      for (int i = 0; i < int(round.judged.size()); ++i) {
        const Draft& draft = round.judged[size_t(i)];
        here += draft.copied > 0, drawn += draft.copied == 0;
        accepted += draft.copied > 0 && i < round.accepted;
        check(draft.confidence > 0.0 && draft.confidence <= 1.0, "a draft without a chance", where);
      }
      check(here <= round.copied && round.copied <= round.rows, "copies are not counted", where);
      copied += round.copied;
    });
    check(accepted <= copied, "more copies were right than there were", where);
    if (planned) return;   // the policy goes by measured time: on a busy machine it may do without
    check(accepted > kTokens / 4, "too few copies were right", where);
    check(rounds < kTokens / 2, "too many rounds for a text that repeats itself", where);
    check((drawn > 0) == (schedule.lookahead > 0), "the head drafts where it may, and only there", where);
  };
  run("alone", alone, {0}, false);
  run("recycled", recycled, {0}, false);
  run("fixed", fixed, {0}, false);
  run("surviving", surviving, {0}, false);
  run("surviving, two devices", surviving, {0, 1}, false);
  run("overlapped", overlapped, {0}, false);
  run("overlapped, two stages", overlapped, {0, 0}, false);
  run("planned", {}, {0}, true);
}

// -- failures ----------------------------------------------------------------------------------------------------------

// An answer on a driver that fails meanwhile: what was committed is right, and the error says what failed.
void fails(const char* what, const std::string& line, const std::function<void(Captured*)>& spoil, bool overlap) {
  const std::string where = std::string("failure: ") + what + (overlap ? ", overlapped" : ", in turns");
  levers().fake_cuda_repair();
  Captured captured(11, 1000, {0, 0}, 0.8, true);
  const std::vector<int> prompt = {4, 5};
  const std::vector<int> plain = captured.model.plain(prompt, 200);
  Schedule schedule;
  schedule.first_chunk = 2, schedule.max_chunk = 4, schedule.lookahead = 6, schedule.overlap = overlap;
  const Limits limits{int(plain.size()), {}};
  const int first = captured.begin(prompt, limits, schedule, false);
  std::vector<int> known = prompt;
  bool told = false;
  {
    GraphCarrier carrier(captured.lanes.get(), captured.graphs, schedule, limits, 1, false);
    carrier.begin(prompt, 0, first);
    int events = 0;
    try {
      while (auto event = carrier.next()) {
        check_round(std::get<Round>(*event), plain, &known, where);
        if (++events == 3) spoil(&captured);
      }
    } catch (const DriverError& error) {
      told = true;
      check(std::strstr(error.what(), line.c_str()) != nullptr, error.what(), where);
      check(std::strchr(error.what(), '\n') == nullptr, "an error of more than one line", where);
    }
    check(told, "nothing was said of the failure", where);
    check(carrier.tokens() == known && known.size() >= prompt.size() + 3, "the committed text was not kept", where);
    check(!carrier.next(), "an answer goes on after its error", where);
  }
  levers().fake_cuda_repair();
}

// Whoever makes, measures with and drops lanes on several GPUs has the same GPU as before: torch allocates on it.
void the_callers_gpu_stays() {
  levers().fake_cuda_repair();
  Context its = nullptr, now = nullptr;
  driver().cuDevicePrimaryCtxRetain(&its, 0);
  driver().cuCtxSetCurrent(its);
  const auto stays = [&](const char* after) {
    driver().cuCtxGetCurrent(&now);
    check(now == its, "another GPU is the calling thread's", after);
  };
  void* graph = levers().fake_cuda_graph([](void*) { return 0; }, nullptr);
  {
    Lanes lanes(0, {0, 1});
    stays("making lanes");
    lanes.run(1, {static_cast<GraphExec>(graph)});
    stays("a run");
  }
  stays("dropping lanes");
}

void failures() {
  for (bool overlap : {false, true}) {
    const auto fail_at = [](const char* function, int result) {
      return [=](Captured*) { levers().fake_cuda_fail(function, 5, result); };
    };
    fails("out of memory", "out of memory (launching a graph: CUDA_ERROR_OUT_OF_MEMORY", fail_at("cuGraphLaunch", 2), overlap);
    fails("a refused launch", "a kernel failed", fail_at("cuGraphLaunch", 719), overlap);
    if (overlap) fails("a refused record", "the NVIDIA driver refused", fail_at("cuEventRecord", 400), overlap);
    fails("a failing kernel", "a kernel failed", [](Captured* c) { c->stages.back()->fails_after = 2; }, overlap);
    fails("a lost device", "the GPU is lost", [](Captured*) { levers().fake_cuda_lose(40, 999); }, overlap);
    fails("an uncorrectable error", "the GPU is lost", [](Captured*) { levers().fake_cuda_lose(1, 214); }, overlap);
    const auto falls_silent = [](Captured*) {
      setenv("PPSD_CUDA_TIMEOUT", "1", 1);
      levers().fake_cuda_stall(1);
    };
    fails("a silent device", "has not answered for 1 seconds", falls_silent, overlap);
    setenv("PPSD_CUDA_TIMEOUT", kPatience, 1);
  }
  // What fails while things are made: nothing is left behind.
  for (const char* function : {"cuStreamCreateWithPriority", "cuEventCreate", "cuDevicePrimaryCtxRetain"}) {
    levers().fake_cuda_repair();
    levers().fake_cuda_fail(function, 1, 2);
    bool told = false;
    try {
      const Lanes lanes(0, {0});
    } catch (const DriverError& error) {
      told = std::strstr(error.what(), "out of memory") != nullptr;
    }
    check(told && levers().fake_cuda_streams() == 0 && levers().fake_cuda_events() == 0, "making streams fails badly", function);
  }
  bool told = false;
  try {
    device_facts(5);
  } catch (const DriverError& error) {
    told = std::strstr(error.what(), "there is no GPU 5: the driver sees 2") != nullptr;
  }
  check(told, "a GPU that is not there", "device_facts");
  // A session: the error comes after what was committed, and only once.
  levers().fake_cuda_repair();
  Captured captured(3, 1000, {0}, 0.8, true);
  GraphRequest request;
  request.prompt = {1};
  request.limits.end = 100;
  request.schedule.first_chunk = request.schedule.max_chunk = request.schedule.lookahead = 3;
  request.first = captured.begin(request.prompt, request.limits, request.schedule, false);
  captured.stages.back()->fails_after = 4;
  GraphSession session(captured.lanes, captured.graphs, request, nullptr);
  int events = 0, errors = 0;
  for (bool over = false; !over;) {
    Event event;
    try {
      over = !next_event(session, &event);
      events += !over;
    } catch (const DriverError&) {
      ++errors;
    }
  }
  check(events >= 1 && events <= 5 && errors == 1, "a failing session", "a session");
  levers().fake_cuda_repair();
}

int run(double seconds, uint64_t seed) {
  setenv("PPSD_CUDA_DRIVER", PPSD_FAKE_CUDA, 1);
  setenv("PPSD_CUDA_TIMEOUT", kPatience, 1);
  check(device_facts(0).name == "Fake GPU" && device_facts(1).major == 9, "the fake driver is not the one in use", "device_facts");
  calls_come_in_order();
  launches_of_a_token();
  copies_are_offered_before_their_round();
  copies_are_accepted();
  the_callers_gpu_stays();
  failures();
  int64_t rounds = 0, models = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do rounds += answers_of_a_model(seed + uint64_t(models++));
  while (Clock::now() < end);
  check(rounds > 0, "too little time for anything", "cuda_carrier");
  std::printf("cuda_carrier: ok, %lld rounds of %lld models, seed %llu\n", (long long)rounds,
              (long long)models, (unsigned long long)seed);
  return 0;
}

}  // namespace
}  // namespace ppsd::test

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10.0;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  try {
    return ppsd::test::run(seconds, seed);
  } catch (const std::exception& error) {
    ppsd::test::fail(error.what(), "an exception");
  }
}
