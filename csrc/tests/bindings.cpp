// What only tests and benchmarks call.
#include "../bindings/bindings.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <mutex>

#include "../cpu/checkpoint.h"
#include "../cpu/team.h"
#include "../decoding/calibrate.h"
#include "../decoding/policy.h"
#include "../pipeline/noise.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

// A known answer in simulated time: [(seconds, event)]. text: the prompt and the answer. draw(position, place, right) -> (token,
// confidence, second choice, its confidence).
py::list replay(const Steering& steering, std::vector<int> text, int prompt, py::function draw, const Limits& limits,
                const StageCosts& costs, const std::optional<OwnedNgrams>& ngrams, uint64_t seed) {
  const auto drawn = [draw = std::move(draw)](int position, int place, bool right) {
    const auto [token, confidence, sibling, chance] = draw(position, place, right).cast<std::tuple<int, double, int, double>>();
    return Draft{token, confidence, 0, sibling, chance};
  };
  return in_simulated_time(steering, {std::move(text), prompt, drawn, limits}, seed, costs, ngrams.value_or(OwnedNgrams()), nullptr).first;
}

// Made-up stages and a made-up clock, the methods of a Python object.
class PyBench : public Bench {
 public:
  explicit PyBench(const py::object& bench) : bench_(bench) {}
  double now() override { return ask<double>("now"); }
  double draft(bool draw) override { return ask<double>("draft", draw); }
  double verify(int rows, int context) override { return ask<double>("verify", rows, context); }
  bool short_handed() override { return ask<bool>("short_handed"); }
  void work_on(int stage) override {
    const py::gil_scoped_acquire acquire;
    bench_.attr("work_on")(stage);
  }

 private:
  template <class Answer, class... Values>
  Answer ask(const char* name, Values... values) {
    const py::gil_scoped_acquire acquire;
    return bench_.attr(name)(values...).template cast<Answer>();
  }
  const py::object& bench_;
};

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
        py::arg("costs"), py::arg("ngrams") = py::none(), py::arg("seed") = 0);
  m.def("random_text", [](uint64_t seed, int tokens) { return random_answer(tokens, {0.0}, 0.0, seed).text; });

  m.def("calibrate", [](const py::object& bench, int threads, bool overlap, double step_share) {
    const py::gil_scoped_release release;
    PyBench made_up(bench);
    return calibrate(&made_up, threads, overlap, step_share);
  }, py::arg("bench"), py::arg("threads"), py::arg("overlap"), py::arg("step_share"));

  m.def(
      "allot",
      [](const std::array<std::vector<std::pair<int, double>>, 4>& seen, double draft_share,
         const std::vector<double>& acceptance, int others, int writing, int left, int most, double margin,
         int reading, int sharers, int copying) {
        PassTimes times;
        times.sharers = sharers;
        times.draft_share = draft_share;
        times.margin = margin;
        PassTime* const kinds[] = {&times.early, &times.draft, &times.late, &times.choose};
        for (int kind = 0; kind < 4; ++kind)
          for (const auto& [rows, seconds] : seen[kind]) kinds[kind]->observe(rows, seconds);
        const Allotment given = allot(times, acceptance, others, writing, left, most, reading, copying);
        return py::make_tuple(given.drafts, given.tokens_per_second, given.row_seconds, given.draft_seconds, given.copies);
      },
      py::arg("seen"), py::arg("draft_share"), py::arg("acceptance"), py::arg("others"), py::arg("writing"),
      py::arg("left"), py::arg("most"), py::arg("margin") = 1.0, py::arg("reading") = 0,
      py::arg("sharers") = 1, py::arg("copying") = 1);
  m.def("running_threads", &running_threads);
  m.def("let_threads_start", &let_threads_start, py::arg("count"));
  m.def("worker_set", &worker_set, py::arg("size"), py::arg("pinnable"), py::arg("seconds"), py::arg("lost"),
        py::arg("room"));
  py::class_<Controller>(m, "StopRule", "A stop rule of csrc/pipeline/stop_rules.cpp at work.")
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
  m.def("packed", &packed, py::arg("rows"), py::arg("format"));
  m.def("philox", [](uint64_t seed, std::array<uint32_t, 4> counter) { return philox(PhiloxKey(seed), counter); });
  m.def("uniform", [](uint64_t seed, int position, int id, uint32_t stream) {
    return uniform_from_word(philox(PhiloxKey(seed), {uint32_t(id), uint32_t(position), stream, 0})[0]);
  });
}

[[maybe_unused]] const bool kLinked = (bind_testing = &bind, true);

}  // namespace
