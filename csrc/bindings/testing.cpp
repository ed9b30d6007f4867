// What only tests and benchmarks call.
#include "bindings.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <mutex>

#include "../cpu/calibrate.h"
#include "../cpu/checkpoint.h"
#include "../cpu/roster.h"
#include "../pipeline/lockstep.h"
#include "../pipeline/toy_stages.h"
#include "../decoding/allotment.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

// The sibling is the text's token now; ids: the rows of a stage.
void adopt(const std::optional<Sibling>& adopted, const std::map<int, int>& siblings, std::vector<int>* ids) {
  if (!adopted) return;
  ids->resize(adopted->position);
  ids->push_back(siblings.at(adopted->position));
}

// Stages made of Python functions, for comparing the lock-step carrier with plain decoding: one thread,
// and the interpreter lock is held throughout.
class PyDraftStage final : public DraftStage {
 public:
  explicit PyDraftStage(py::function draw) : draw_(std::move(draw)) {}

  bool step(const DraftStep& step, Draft* draft, const Cancelled&) override {
    adopt(step.adopted, siblings_, &ids_);
    if (step.start > int(ids_.size())) throw std::runtime_error("a draft step left a gap");
    ids_.resize(step.start);
    ids_.insert(ids_.end(), step.ids.begin(), step.ids.end());
    if (draft != nullptr) {
      const auto [token, confidence, sibling, sibling_confidence] = draw_(ids_, step.place).cast<std::tuple<int, double, int, double>>();
      *draft = {token, confidence, 0, -1, 0.0};
      if (step.sibling_bar > 0.0 && 1.0 - confidence >= step.sibling_bar)
        draft->sibling = sibling, draft->sibling_confidence = sibling_confidence;
    }
    for (const Sibling& sibling : step.siblings) siblings_[sibling.position] = sibling.id;
    return true;
  }
  void export_hidden(Chunk* chunk) override {   // the hidden state of a row is its token
    if (chunk->start + chunk->rows() > int(ids_.size())) throw std::runtime_error("rows that have not been run");
    chunk->hidden.assign(ids_.begin() + chunk->start, ids_.begin() + chunk->start + chunk->rows());
    for (const Sibling& sibling : chunk->siblings) chunk->hidden.push_back(float(siblings_.at(sibling.position)));
  }

 private:
  py::function draw_;
  std::vector<int> ids_;
  std::map<int, int> siblings_;   // by position
};

class PyVerifyStage final : public VerifyStage {
 public:
  explicit PyVerifyStage(py::function truth) : truth_(std::move(truth)) {}

  bool run(Chunk* chunk, const Cancelled&) override {
    adopt(chunk->adopted, siblings_, &ids_);
    if (chunk->start > int(ids_.size())) throw std::runtime_error("a chunk left a gap");
    ids_.resize(chunk->start);
    ids_.insert(ids_.end(), chunk->hidden.begin(), chunk->hidden.begin() + chunk->rows());
    for (int i = 0; i < int(chunk->siblings.size()); ++i)
      siblings_[chunk->siblings[i].position] = int(chunk->hidden[chunk->rows() + i]);
    return true;
  }
  std::vector<int> choose(const Chunk& chunk, int last) override {
    std::vector<int> chosen;
    for (int end = chunk.start + chunk.rows() - last; end < chunk.start + chunk.rows(); ++end)
      chosen.push_back(truth_(std::vector<int>(ids_.begin(), ids_.begin() + end + 1)).cast<int>());
    for (const Sibling& sibling : chunk.siblings) {
      std::vector<int> text(ids_.begin(), ids_.begin() + sibling.position);
      text.push_back(siblings_.at(sibling.position));
      chosen.push_back(truth_(text).cast<int>());
    }
    return chosen;
  }

 private:
  py::function truth_;
  std::vector<int> ids_;
  std::map<int, int> siblings_;   // by position
};

py::list lock_step_events(const std::vector<int>& prompt, py::function draw, py::function truth, const Schedule& schedule,
                          const Limits& limits, uint64_t seed, int stages, int per_stage) {
  PyDraftStage draft(std::move(draw));
  PyVerifyStage verify(std::move(truth));
  LockStep carrier({&draft, {&verify}}, schedule, limits, seed, {stages, per_stage}, true);
  carrier.begin(prompt, 0);
  py::list events;
  while (auto event = carrier.next()) events.append(event_of(*event));
  return events;
}

// A recorded answer in simulated time: [(seconds, event)].
py::list replay(const Steering& steering, const std::vector<int>& prompt, py::function draw, py::function truth,
                const Limits& limits, const StageCosts& costs, const std::optional<OwnedNgrams>& ngrams) {
  PyDraftStage draft(std::move(draw));
  PyVerifyStage verify(std::move(truth));
  return in_simulated_time(steering, {&draft, {&verify}}, prompt, limits, 0, costs, ngrams.value_or(OwnedNgrams()), nullptr).first;
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

// The same in lock-step: [(tick, event)].
py::list lock_step_toy(const Schedule& schedule, int tokens, std::vector<double> acceptance, uint64_t seed, int stages,
                       int per_stage, double second) {
  Toy toy(tokens, std::move(acceptance), seed, size_t(stages), second);
  LockStep carrier(toy.stages(), schedule, toy.limits, seed, {stages, per_stage}, false);
  carrier.begin(Toy::prompt(), 0);
  py::list events;
  while (auto event = carrier.next()) events.append(py::make_tuple(carrier.tick(), event_of(*event)));
  return events;
}

// The draws of a stop rule over a history, for comparing it with its twin: a confidence is a draft, {chance, stopped} a copy.
using Told = std::variant<double, std::pair<double, bool>, std::vector<std::pair<double, bool>>>;
std::vector<bool> stop_rule_draws(const Schedule& schedule, uint64_t seed, const std::vector<Told>& history) {
  const auto controller = Controller::make(schedule.stop_rule, seed);
  std::vector<bool> draws;
  for (const auto& item : history) {
    if (const double* confidence = std::get_if<double>(&item)) {
      draws.push_back(controller->stop(*confidence));
    } else if (const auto* copy = std::get_if<std::pair<double, bool>>(&item)) {
      draws.push_back(controller->may_copy(copy->first, copy->second));
      draws.push_back(controller->stop_copying(copy->first));
    } else {
      std::vector<Judged> verdict;
      for (const auto& [confidence, accepted] : std::get<2>(item)) verdict.push_back({confidence, accepted});
      controller->observe(verdict);
    }
  }
  return draws;
}

// A pass of `seconds` beside other programs that leave `room` members a core: if more are at work, they sleep for a share
// `lost` of it waiting for the others.
Team::Pass crowded_pass(int active, int room, double seconds, double lost) {
  return {seconds, active > room ? lost * seconds * (active - 1) : 0.0};
}

// How many members would work, and whether on cores of their own, after each of these passes.
std::vector<std::pair<int, bool>> roster(int size, bool pinnable, double seconds, double lost, const std::vector<int>& room) {
  Roster roster(size, pinnable);
  std::vector<std::pair<int, bool>> after;
  for (const int fit : room) {
    const Team::Pass pass = crowded_pass(roster.active(), fit, seconds, lost);
    roster.after(pass.seconds, pass.slept);
    after.emplace_back(roster.active(), roster.pinned());
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
  m.def("lock_step_events", &lock_step_events, py::arg("prompt"), py::arg("draw"), py::arg("truth"), py::arg("schedule"),
        py::arg("limits"), py::arg("seed"), py::arg("stages"), py::arg("per_stage"));

  m.def("replay", &replay, py::arg("schedule"), py::arg("prompt"), py::arg("draw"), py::arg("truth"), py::arg("limits"),
        py::arg("costs"), py::arg("ngrams"));
  m.def("lock_step_toy", &lock_step_toy, py::arg("schedule"), py::arg("tokens"), py::arg("acceptance"), py::arg("seed"),
        py::arg("stages"), py::arg("per_stage"), py::arg("second") = 0.0);
  m.def("toy_answer", [](uint64_t seed, int tokens) { return ToyModel{seed}.plain(Toy::prompt(), 1 + tokens); });

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
  m.def("roster", &roster, py::arg("size"), py::arg("pinnable"), py::arg("seconds"), py::arg("lost"),
        py::arg("room"));
  m.def("stop_rule_draws", &stop_rule_draws, py::arg("schedule"), py::arg("seed"), py::arg("history"));
  m.def("packed", &packed, py::arg("rows"), py::arg("format"));
  m.def("philox", [](uint64_t seed, std::array<uint32_t, 4> counter) { return philox(PhiloxKey(seed), counter); });
  m.def("uniform", [](uint64_t seed, int position, int id, uint32_t stream) {
    return uniform_from_word(philox(PhiloxKey(seed), {uint32_t(id), uint32_t(position), stream, 0})[0]);
  });
}

[[maybe_unused]] const bool kLinked = (bind_testing = &bind, true);

}  // namespace
