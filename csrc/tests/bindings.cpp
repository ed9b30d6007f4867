// What only tests and benchmarks call.
#include "../bindings/bindings.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "../cpu/checkpoint.h"
#include "../cpu/team.h"
#include "../loop/policy.h"
#include "../core/noise.h"
#include "../core/scheduler.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

// Rows that a stage has passed from `start` on are void: these take their place.
void pass_rows(std::vector<int>* rows, int start, const std::vector<int>& ids) {
  if (start > int(rows->size())) throw std::logic_error("rows that the stage before has not passed");
  rows->resize(size_t(start));
  rows->insert(rows->end(), ids.begin(), ids.end());
}

// The rounds of a scheduler whose answer is known: text is the prompt and the answer. Coins of `seed` decide which of `stages`
// verification stages and the draft stage is done next. draw(position, place, right) -> (token, confidence); right: all that
// stands before the draft is of the text.
py::list replay(const Schedule& schedule, const std::vector<int>& text, int prompt, const py::function& draw, const Limits& limits,
                const std::optional<OwnedNgrams>& ngrams, uint64_t seed, size_t stages) {
  Scheduler scheduler(schedule, limits, seed);
  if (ngrams) scheduler.remember(*ngrams);
  std::vector<int> drafted(text.begin(), text.begin() + prompt), verified = drafted;
  const auto right = [&](const std::vector<int>& rows) { return std::equal(rows.begin(), rows.end(), text.begin()); };
  py::list rounds;
  rounds.append(event_of(Event(scheduler.begin(drafted, 0, text[size_t(prompt)]))));
  std::optional<DraftStep> step;
  std::deque<Chunk> passes;
  enum class Done { kBeginStep, kEndStep, kLaunch, kLand };
  for (int turn = 0; !scheduler.finished(); ++turn) {
    std::vector<Done> possible;
    if (step) possible.push_back(Done::kEndStep);
    else if (scheduler.may_step()) possible.push_back(Done::kBeginStep);
    if (passes.size() < stages && scheduler.ready()) possible.push_back(Done::kLaunch);
    if (!passes.empty()) possible.push_back(Done::kLand);
    if (possible.empty()) throw std::logic_error("the scheduler stands still");
    switch (possible[size_t(coin(~seed, turn) * double(possible.size()))]) {
      case Done::kBeginStep: step = scheduler.next_step(); break;
      case Done::kEndStep: {
        pass_rows(&drafted, step->start, step->ids);
        Draft draft;
        if (step->draw)
          std::tie(draft.token, draft.confidence) = draw(drafted.size(), step->depth, right(drafted)).cast<std::pair<int, double>>();
        scheduler.stepped(*step, step->draw ? &draft : nullptr);
        step.reset();
        break;
      }
      case Done::kLaunch: {
        const Chunk chunk = scheduler.launch();
        if (chunk.start + chunk.rows() > int(drafted.size())) throw std::logic_error("rows that have not been drafted");
        passes.push_back(chunk);
        break;
      }
      case Done::kLand: {
        Verdict verdict{passes.front().epoch, passes.front().start, {}, {}, {}};
        for (const int id : passes.front().ids) {
          pass_rows(&verified, verdict.start + int(verdict.true_ids.size()), {id});
          verdict.true_ids.push_back(right(verified) ? text[verified.size()] : -1);
        }
        passes.pop_front();
        if (const auto round = scheduler.land(verdict)) {
          rounds.append(event_of(Event(*round)));
          if (round->epoch != scheduler.epoch()) step.reset();   // it is void
        }
      }
    }
  }
  return rounds;
}

// A pass of `seconds` beside other programs that leave `room` members a core: if more are at work, they sleep for a share
// `lost` of it waiting for the others.
Team::Pass crowded_pass(int active, int room, double seconds, double lost) {
  return {seconds, active > room ? lost * seconds * (active - 1) : 0.0};
}

// How many members would work, and whether on cores of their own, after each of these passes.
std::vector<std::pair<int, bool>> worker_set(int size, bool pinnable, double seconds, double lost, const std::vector<int>& room) {
  WorkerSet workers(size, pinnable);
  std::vector<std::pair<int, bool>> after;
  for (const int fit : room) {
    const Team::Pass pass = crowded_pass(workers.active(), fit, seconds, lost);
    workers.after(pass.seconds, pass.slept);
    after.emplace_back(workers.active(), workers.pinned());
  }
  return after;
}

// The team of a loop, between answers, from now on finds such passes, room[i] in turn and over again -> how
// often each number of members has worked, counted as they go on.
struct Crowd {
  std::mutex mutex;
  size_t passes = 0;
  std::map<int, int> worked;
};

std::shared_ptr<Crowd> crowd(Loop* loop, double seconds, double lost, const std::vector<int>& room) {
  auto crowd = std::make_shared<Crowd>();
  loop->judge_by([crowd, seconds, lost, room](int active) {
    const std::lock_guard<std::mutex> lock(crowd->mutex);
    ++crowd->worked[active];
    return crowded_pass(active, room[crowd->passes++ % room.size()], seconds, lost);
  });
  return crowd;
}

// What a matrix (an array, or Blocks) is once it is packed: [rows][columns], columns a multiple of 32.
py::array_t<float> packed(const py::object& rows, const std::string& format) {
  const Tensor tensor = tensor_of(rows, "rows");
  Team team(1, {});
  const Packer packer(pick_kernels(), format_of(format), ModelShape(), &team);
  const Memory memory(packer.matrix_bytes(int(tensor.rows), int(tensor.columns)));
  uint8_t* free = memory.as<>();
  const Matrix matrix = packer.matrix(tensor, &free);
  py::array_t<float> out({tensor.rows, tensor.columns});
  for (int r = 0; r < int(tensor.rows); ++r) pick_kernels().unpack(matrix, r, out.mutable_data(r));
  return out;
}

// The number whose shortest text is that of a float: 0.7, not 0.699999988.
double shortest(float value) {
  char text[32];
  for (int digits = 6; digits <= 9; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, double(value));
    if (std::strtof(text, nullptr) == value) break;
  }
  return std::strtod(text, nullptr);
}

py::object sampling_params_of(const Sampling& s) {
  using py::literals::operator""_a;
  py::dict biases;
  for (const auto& [id, bias] : s.logit_bias) biases[py::int_(id)] = shortest(bias);
  return py::module_::import("ppsd_rt.sampling.params")
      .attr("SamplingParams")("temperature"_a = shortest(s.temperature), "top_k"_a = s.top_k, "top_p"_a = shortest(s.top_p),
                              "min_p"_a = shortest(s.min_p), "repetition_penalty"_a = shortest(s.repetition_penalty),
                              "presence_penalty"_a = shortest(s.presence_penalty),
                              "frequency_penalty"_a = shortest(s.frequency_penalty), "logit_bias"_a = biases,
                              "logprobs"_a = s.logprobs < 0 ? py::object(py::none()) : py::int_(s.logprobs),
                              "max_tokens"_a = py::none(), "min_tokens"_a = s.min_tokens,
                              "stop_token_ids"_a = s.stop_ids, "seed"_a = s.seed);
}

// Of the survival rule, as the policy chooses it.
py::object schedule_of(const Schedule& s) {
  using py::literals::operator""_a;
  const py::object rule = py::module_::import("ppsd_rt.pipeline.stop_rules")
      .attr("Survival")("threshold"_a = s.stop_rule.threshold, "copy_threshold"_a = s.stop_rule.copy_threshold,
                        "thresholds"_a = py::tuple(py::cast(s.stop_rule.thresholds)),
                        "copy_thresholds"_a = py::tuple(py::cast(s.stop_rule.copy_thresholds)));
  return py::module_::import("ppsd_rt.pipeline.schedule")
      .attr("Schedule")("first_chunk"_a = s.first_chunk, "max_chunk"_a = s.max_chunk, "lookahead"_a = s.lookahead,
                        "overlap"_a = s.overlap, "stop_rule"_a = rule, "lookup"_a = s.lookup, "recycle"_a = s.recycle);
}

void bind(py::module_& m) {
  py::class_<Crowd, std::shared_ptr<Crowd>>(m, "Crowd",
      "Passes of teams beside made-up other programs, counted by the members that worked.")
      .def_property_readonly("worked", [](Crowd& crowd) {
        const std::lock_guard<std::mutex> lock(crowd.mutex);
        return crowd.worked;
      });

  m.def("read_sampling", [](const Sampling& sampling) { return sampling_params_of(sampling); }, py::arg("sampling"));
  m.def("crowd", [](PyLoop& loop, double seconds, double lost, const std::vector<int>& room) {
    return crowd(&loop.loop(), seconds, lost, room);
  }, py::arg("loop"), py::arg("seconds"), py::arg("lost"), py::arg("room"));
  m.def("replay", &replay, py::arg("schedule"), py::arg("text"), py::arg("prompt"), py::arg("draw"), py::arg("limits"),
        py::arg("ngrams") = py::none(), py::arg("seed") = 0, py::arg("stages") = 1);
  m.def(
      "allot",
      [](const std::array<std::vector<std::pair<int, double>>, 4>& seen, double draft_share,
         const std::vector<double>& acceptance, int others, int writing, int left, int most, double margin,
         int reading, int sharers, int copying) {
        PassTimes times;
        times.sharers = sharers;
        times.draft_share = draft_share;
        times.margin = margin;
        PassTime PassTimes::* const kinds[] = {&PassTimes::early, &PassTimes::draft, &PassTimes::late, &PassTimes::choose};
        for (const size_t kind : {0, 2, 3, 1})   // a draft is known beside plain passes
          for (const auto& [rows, seconds] : seen[kind]) times.observe(kinds[kind], rows, seconds);
        const Allotment given = allot(times, acceptance, others, writing, left, most, reading, copying);
        return py::make_tuple(given.drafts, given.tokens_per_second, given.row_seconds, given.draft_seconds, given.copies);
      },
      py::arg("seen"), py::arg("draft_share"), py::arg("acceptance"), py::arg("others"), py::arg("writing"),
      py::arg("left"), py::arg("most"), py::arg("margin") = 1.0, py::arg("reading") = 0,
      py::arg("sharers") = 1, py::arg("copying") = 1);
  struct Alone {   // an answer alone, in made-up time
    Policy policy;
    Drafting answer;
    std::chrono::steady_clock::time_point now{std::chrono::seconds(1)};
  };
  py::class_<Alone>(m, "Alone", "The policy of one answer after the other, none of which has company, in made-up time.")
      .def(py::init([](double draft_share, double prior, bool overlaps) {
             return Alone{Policy(true, draft_share, prior, overlaps ? Policy::Stages::kThreads : Policy::Stages::kNone), {}};
           }),
           py::arg("draft_share"), py::arg("prior"), py::arg("overlaps") = false)
      .def("begin", [](Alone& alone, bool copies) {
             alone.answer = {};
             alone.answer.automatic = true;
             alone.answer.asked.recycle = copies;
           }, py::arg("copies") = false)
      .def("plan", [](Alone& alone) {
             std::vector<Policy::Writer> writers{{&alone.answer, {}}};
             alone.policy.plan(&writers, {0, 0, kPassRows - 1, true, alone.answer.overlaps});
             return schedule_of(writers.front().schedule);
           })
      .def("took", [](Alone& alone, const std::string& kind, int rows, double seconds) {
             alone.policy.took(kind == "early" ? &PassTimes::early : kind == "draft" ? &PassTimes::draft
                               : kind == "late" ? &PassTimes::late : &PassTimes::choose, rows, seconds);
             alone.now += std::chrono::nanoseconds(int64_t(1e9 * seconds));
           }, py::arg("kind"), py::arg("rows"), py::arg("seconds"))
      .def("learn", [](Alone& alone, int drafts, int accepted, int copied) {
             Round round;
             round.rows = drafts + 1;
             round.committed.assign(size_t(accepted) + 1, 0);
             round.judged.assign(size_t(std::min(accepted + 1, drafts)), Draft{});
             for (int i = 0; i < std::min(copied, int(round.judged.size())); ++i) round.judged[size_t(i)].copied = 1;
             round.copied = copied;
             round.accepted = accepted;
             round.dropped = drafts - int(round.judged.size());
             alone.policy.learn(&alone.answer, round, false, alone.now);
           }, py::arg("drafts"), py::arg("accepted"), py::arg("copied") = 0)
      .def_property_readonly("credit", [](const Alone& alone) { return alone.answer.credit; })
      .def("learned", [](const Alone& alone) { return alone.policy.learned(); })
      .def("know", [](Alone& alone, const std::vector<double>& numbers) { alone.policy.know(numbers); }, py::arg("numbers"))
      .def("explain", [](const Alone& alone) { return alone.policy.explain(); });
  m.def("running_threads", &running_threads);
  m.def("let_threads_start", &let_threads_start, py::arg("count"));
  m.def("worker_set", &worker_set, py::arg("size"), py::arg("pinnable"), py::arg("seconds"), py::arg("lost"),
        py::arg("room"));
  py::class_<Controller>(m, "StopRule", "A stop rule of csrc/core/stop_rules.cpp at work.")
      .def(py::init([](const Schedule& schedule, uint64_t seed) { return Controller::make(schedule.stop_rule, seed); }))
      .def("stop", &Controller::stop)
      .def("stop_copying", &Controller::stop_copying)
      .def("may_copy", &Controller::may_copy)
      .def("observe", [](Controller& controller, const std::vector<std::pair<double, bool>>& judged) {
        std::vector<Judged> verdict;
        for (const auto& [confidence, accepted] : judged) verdict.push_back({confidence, accepted});
        controller.observe(verdict);
      });
  m.def("beta", [](uint64_t seed, double a, double b, int draws) {
    NoiseStream stream(seed);
    std::vector<double> drawn;
    for (int i = 0; i < draws; ++i) drawn.push_back(stream.beta(a, b));
    return drawn;
  });
  m.def("row", [](const py::object& rows, int64_t row) {
    const Tensor tensor = tensor_of(rows, "rows");
    py::array_t<float> out(tensor.columns);
    read_row(tensor, row, out.mutable_data());
    return out;
  }, py::arg("rows"), py::arg("row"));
  m.def("packed", &packed, py::arg("rows"), py::arg("format"));
  m.def("philox", [](uint64_t seed, std::array<uint32_t, 4> counter) { return philox(PhiloxKey(seed), counter); });
  m.def("uniform", [](uint64_t seed, int position, int id, uint32_t stream) {
    return uniform_from_word(philox(PhiloxKey(seed), {uint32_t(id), uint32_t(position), stream, 0})[0]);
  });
}

[[maybe_unused]] const bool kLinked = (bind_testing = &bind, true);

}  // namespace
