// The CUDA part of ppsd_rt._native: the driver, captured stages, the plan of launches. Nothing here needs a GPU to be built.
#include <pybind11/stl.h>

#include "bindings.h"
#include "cuda/loop.h"
#include "cuda/session.h"

namespace py = pybind11;

using namespace ppsd;
using namespace ppsd::bindings;
using namespace ppsd::cuda;

namespace {

// Addresses and handles come from Python as integers.
template <class Handle>
Handle handle_of(uint64_t number) {
  return reinterpret_cast<Handle>(uintptr_t(number));
}

// What ends with the driver or a thread ends without the interpreter lock, and in its own process alone.
template <class Object>
std::shared_ptr<Object> unlocked(Object* object) {
  return std::shared_ptr<Object>(object, [made = forks()](Object* ended) {
    if (made != forks()) return;
    if (PyGILState_Check()) {
      const py::gil_scoped_release release;
      delete ended;
    } else {
      delete ended;
    }
  });
}

Graphs graphs_of(const py::dict& values) {
  Graphs graphs;
  graphs.draft = handle_of<GraphExec>(values["draft"].cast<uint64_t>());
  graphs.row = handle_of<GraphExec>(values["row"].cast<uint64_t>());
  for (const uint64_t exec : values["verify"].cast<std::vector<uint64_t>>()) graphs.verify.push_back(handle_of<GraphExec>(exec));
  using Copies = std::vector<std::vector<std::tuple<uint64_t, uint64_t, int, int, size_t, int>>>;
  for (const auto& of_stage : values["copies"].cast<Copies>()) {
    graphs.copies.emplace_back();
    for (const auto& [to, from, to_device, from_device, row_bytes, rows] : of_stage)
      graphs.copies.back().push_back({Address(to), Address(from), to_device, from_device, row_bytes, rows});
  }
  graphs.take_apart = values["take_apart"].cast<bool>();
  graphs.verdict_apart = values["verdict_apart"].cast<bool>();
  const auto ring = values["ring"].cast<std::pair<uint64_t, int>>(), drafts = values["drafts"].cast<std::pair<uint64_t, int>>();
  graphs.verdicts = Ring(handle_of<const int32_t*>(ring.first), ring.second, record::kWords);
  graphs.drafts = Ring(handle_of<const int32_t*>(drafts.first), drafts.second, record::kDraftWords);
  graphs.sequence = values["sequence"].cast<int32_t>();
  graphs.drawn = values["drawn"].cast<int32_t>();
  graphs.draft_records = values["draft_records"].cast<bool>();
  graphs.rounds = handle_of<GraphExec>(values["rounds"].cast<uint64_t>());
  return graphs;
}

const char* name_of(Step::Kind kind) {
  switch (kind) {
    case Step::Kind::kDraft: return "draft";
    case Step::Kind::kRow: return "row";
    case Step::Kind::kVerify: return "verify";
    case Step::Kind::kRounds: return "rounds";
    case Step::Kind::kWait: break;
  }
  return "wait";
}

// The plan, for a carrier written in Python.
struct PyPlan {
  std::shared_ptr<Planner> planner;
  bool in_turns;
  Plan plan;
  Step step;   // the last one

  py::object land(const py::list& words, int64_t drafts_done, double seconds) {
    const auto record = words.cast<std::vector<int32_t>>();
    if (int(record.size()) != record::kWords) throw std::runtime_error("a verdict's record has another length");
    const std::optional<Round> round = plan.land(record_of(record.data()), drafts_done);
    if (!round) return py::none();
    if (planner) replan(planner.get(), *round, seconds, in_turns, &plan);
    return event_of(Event(*round));
  }
};

}  // namespace

void bind_cuda(py::module_& m) {
  py::register_exception<DriverError>(m, "CudaError", PyExc_RuntimeError).doc() = "What the CUDA driver said, in one line.";

  m.def("cuda_device", [](int ordinal) {
    const DeviceFacts facts = device_facts(ordinal);
    return py::make_tuple(facts.name, facts.major, facts.minor, facts.memory);
  }, py::arg("ordinal"));
  m.def("cuda_instantiate", [](uint64_t graph) {
    constexpr unsigned long long kUseNodePriority = 8;   // kernels keep the priority that they were captured with
    GraphExec exec = nullptr;
    check(driver().cuGraphInstantiateWithFlags(&exec, handle_of<Graph>(graph), kUseNodePriority), "instantiating a graph");
    return uint64_t(reinterpret_cast<uintptr_t>(exec));
  }, py::arg("graph"));
  m.def("cuda_destroy_graph", [](uint64_t exec) { driver().cuGraphExecDestroy(handle_of<GraphExec>(exec)); }, py::arg("exec"));

  m.attr("ROUNDS_A_LAUNCH") = Plan::kRoundsALaunch;
  m.attr("SET_CONDITION_CODE") = kSetConditionCode;
  py::class_<Loop>(m, "GraphLoop",
      "A CUDA graph that repeats its body on the device for as long as the word at an address says so.")
      .def(py::init([](int device, const std::vector<uint64_t>& body, uint64_t open, uint64_t again, uint64_t word) {
             std::vector<Graph> round;
             for (uint64_t graph : body) round.push_back(handle_of<Graph>(graph));
             return std::make_unique<Loop>(device, round, handle_of<Graph>(open), handle_of<Graph>(again), Address(word));
           }),
           py::kw_only(), py::arg("device"), py::arg("body"), py::arg("open"), py::arg("again"), py::arg("word"))
      .def_property_readonly("exec", [](const Loop& loop) { return uint64_t(reinterpret_cast<uintptr_t>(loop.exec())); });

  py::class_<Lanes, std::shared_ptr<Lanes>>(m, "GraphLanes",
      "A CUDA context and stream for the draft stage, and one for each verification stage.")
      .def(py::init([](int draft_device, const std::vector<int>& verify_devices) {
             const py::gil_scoped_release release;
             return unlocked(new Lanes(draft_device, verify_devices));
           }),
           py::arg("draft_device"), py::arg("verify_devices"))
      .def("upload", [](const Lanes& lanes, uint64_t exec, int stage) {   // -1: the draft stage's
        const Lane& lane = stage < 0 ? lanes.draft : lanes.verify.at(size_t(stage));
        check(driver().cuCtxSetCurrent(lane.context), "choosing the GPU");
        check(driver().cuGraphUpload(handle_of<GraphExec>(exec), lane.stream), "uploading a graph");
      }, py::arg("exec"), py::arg("stage"))
      .def("timeline", [](Lanes& lanes, const std::vector<std::pair<int, uint64_t>>& launches) {
        std::vector<std::pair<int, GraphExec>> handles;
        for (const auto& [stage, exec] : launches) handles.emplace_back(stage, handle_of<GraphExec>(exec));
        const py::gil_scoped_release release;
        return lanes.timeline(handles);
      }, py::arg("launches"));

  using PyGraphSession = PyAnswer<GraphSession>;
  py::class_<PyGraphSession>(m, "GraphSession",
      "An answer by captured CUDA graphs: iterates over the same tuples as Session.")
      .def(py::init([](std::shared_ptr<Lanes> lanes, const py::dict& graphs, std::vector<int> prompt, int keep, int first,
                       const py::object& schedule, const Limits& limits, uint64_t seed, bool in_turns, bool report_drafts,
                       bool trace) {
             GraphRequest request;
             request.prompt = std::move(prompt);
             request.keep = keep, request.first = first;
             if (py::isinstance<py::dict>(schedule)) request.schedule = schedule_of(schedule.cast<py::dict>());
             else request.planner = schedule.cast<std::shared_ptr<Planner>>();
             request.limits = limits;
             request.seed = seed, request.in_turns = in_turns, request.report_drafts = report_drafts;
             auto session = std::make_unique<PyGraphSession>();
             if (trace) session->trace.reset(new Trace);
             session->session = unlocked(
                 new GraphSession(std::move(lanes), graphs_of(graphs), std::move(request), session->trace.get()));
             return session;
           }),
           py::kw_only(), py::arg("lanes"), py::arg("graphs"), py::arg("prompt"), py::arg("keep"), py::arg("first"),
           py::arg("schedule"), py::arg("limits"), py::arg("seed"), py::arg("in_turns"), py::arg("report_drafts"), py::arg("trace"))
      .def("__iter__", [](PyGraphSession& session) -> PyGraphSession& { return session; })
      .def("__next__", &PyGraphSession::next)
      .def("cancel", &PyGraphSession::cancel)
      .def("close", &PyGraphSession::close)
      .def_readonly("seconds", &PyGraphSession::seconds)
      .def("spans", &PyGraphSession::spans);

  py::class_<PyPlan>(m, "LaunchPlan",
      "What a GPU launches next, and what its records [int32 words] mean: the host half of GraphSession.")
      .def(py::init([](const py::object& schedule, const Limits& limits, uint64_t seed, int stages, bool in_turns) {
             std::shared_ptr<Planner> planner;
             if (!py::isinstance<py::dict>(schedule)) planner = schedule.cast<std::shared_ptr<Planner>>();
             const Schedule first = planner ? planner->schedule() : schedule_of(schedule.cast<py::dict>());
             return PyPlan{planner, in_turns, Plan(allowed(first, in_turns), limits, seed, stages), {}};
           }),
           py::kw_only(), py::arg("schedule"), py::arg("limits"), py::arg("seed"), py::arg("stages"), py::arg("in_turns"))
      .def("begin", [](PyPlan& p, const std::vector<int>& prompt, int keep, int first) {
             return event_of(Event(p.plan.begin(prompt, keep, first)));
           }, py::arg("prompt"), py::arg("keep"), py::arg("first"))
      .def("next", [](PyPlan& p, int64_t drafts_done) {
             p.step = p.plan.next(drafts_done);
             return name_of(p.step.kind);
           }, py::arg("drafts_done"))
      .def_property_readonly("window", [](const PyPlan& p) { return std::make_pair(p.step.first_row, p.step.rows); })
      .def("land", &PyPlan::land, py::arg("record"), py::arg("drafts_done"), py::arg("seconds"))
      .def("wants_confidence", [](const PyPlan& p) { return p.plan.wants_confidence(); })
      .def("drafted", [](PyPlan& p, std::optional<double> confidence) { p.plan.drafted(confidence); }, py::arg("confidence"))
      .def("cancel", [](PyPlan& p) { p.plan.cancel(); })
      .def_property_readonly("finished", [](const PyPlan& p) { return p.plan.finished(); })
      .def_property_readonly("overlapping", [](const PyPlan& p) { return p.plan.overlapping(); })
      .def_property_readonly("passes_in_flight", [](const PyPlan& p) { return p.plan.passes_in_flight(); })
      .def_property_readonly("drafts_launched", [](const PyPlan& p) { return p.plan.drafts_launched(); })
      .def_property_readonly("tokens", [](const PyPlan& p) { return p.plan.tokens(); });
}
