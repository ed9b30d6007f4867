// The CUDA part of ppsd_rt._native: the driver and captured stages. Nothing here needs a GPU to be built.
#include <pybind11/stl.h>

#include "bindings.h"
#include "../cuda/session.h"

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

using StepHandles = std::tuple<uint64_t, uint64_t, std::map<int, uint64_t>, std::vector<uint64_t>>;

Graphs steps_of(const StepHandles& handles) {
  const auto& [draft, row, rounds, verify] = handles;
  Graphs graphs;
  graphs.draft = handle_of<GraphExec>(draft), graphs.row = handle_of<GraphExec>(row);
  graphs.rounds.resize(kMaxRows);
  for (const auto& [drafts, exec] : rounds) graphs.rounds.at(size_t(drafts)) = handle_of<GraphExec>(exec);
  for (const uint64_t exec : verify) graphs.verify.push_back(handle_of<GraphExec>(exec));
  return graphs;
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::register_exception<DriverError>(m, "CudaError", PyExc_RuntimeError).doc() = "What the CUDA driver said, in one line.";

  attributes(py::class_<DeviceFacts>(m, "CudaDevice"), "name", &DeviceFacts::name, "major", &DeviceFacts::major,
         "minor", &DeviceFacts::minor);
  m.def("cuda_device", &device_facts, py::arg("ordinal"));
  m.def("cuda_instantiate", [](uint64_t graph) {
    constexpr unsigned long long kUseNodePriority = 8;   // kernels keep the priority that they were captured with
    GraphExec exec = nullptr;
    check(driver().cuGraphInstantiateWithFlags(&exec, handle_of<Graph>(graph), kUseNodePriority), "instantiating a graph");
    return uint64_t(reinterpret_cast<uintptr_t>(exec));
  }, py::arg("graph"));
  m.def("cuda_destroy_graph", [](uint64_t exec) { driver().cuGraphExecDestroy(handle_of<GraphExec>(exec)); }, py::arg("exec"));

  py::class_<Lanes, std::shared_ptr<Lanes>>(m, "GraphLanes")
      .def(py::init([](int draft_device, const std::vector<int>& verify_devices) {
             const py::gil_scoped_release release;
             return std::shared_ptr<Lanes>(new Lanes(draft_device, verify_devices), WithoutLock());
           }),
           py::arg("draft_device"), py::arg("verify_devices"))
      .def("upload", [](const Lanes& lanes, uint64_t exec, int stage) {
        const Lane& lane = lanes.of(stage);
        const KeptContext kept;
        check(driver().cuCtxSetCurrent(lane.context), "choosing the GPU");
        check(driver().cuGraphUpload(handle_of<GraphExec>(exec), lane.stream), "uploading a graph");
      }, py::arg("exec"), py::arg("stage"))
      .def("run", [](Lanes& lanes, int stage, const std::vector<uint64_t>& execs) {
        std::vector<GraphExec> handles;
        for (const uint64_t exec : execs) handles.push_back(handle_of<GraphExec>(exec));
        const py::gil_scoped_release release;
        return lanes.run(stage, handles);
      }, py::arg("stage"), py::arg("execs"));

  py::class_<Copy>(m, "GraphCopy")
      .def(py::init([](uint64_t to, uint64_t source, int to_device, int source_device, size_t row_bytes, int rows) {
             return Copy{Address(to), Address(source), to_device, source_device, row_bytes, rows};
           }),
           py::kw_only(), py::arg("to"), py::arg("source"), py::arg("to_device"), py::arg("source_device"),
           py::arg("row_bytes"), py::arg("rows"));
  using Words = std::pair<uint64_t, int>;   // an address, and how many records there are
  py::class_<Graphs>(m, "Graphs")
      .def(py::init([](const StepHandles& steps, std::vector<std::vector<Copy>> copies, bool take_apart, bool verdict_apart, Words verdicts, Words drafts,
                       uint64_t offer, int32_t sequence, int32_t drawn, bool draft_records) {
             Graphs graphs = steps_of(steps);
             graphs.copies = std::move(copies);
             graphs.take_apart = take_apart, graphs.verdict_apart = verdict_apart;
             graphs.verdicts = Ring(handle_of<const int32_t*>(verdicts.first), verdicts.second, record::kWords);
             graphs.drafts = Ring(handle_of<const int32_t*>(drafts.first), drafts.second, record::kDraftWords);
             graphs.offer = handle_of<int32_t*>(offer);
             graphs.sequence = sequence, graphs.drawn = drawn, graphs.draft_records = draft_records;
             return graphs;
           }),
           py::kw_only(), py::arg("steps"), py::arg("copies"), py::arg("take_apart"),
           py::arg("verdict_apart"), py::arg("verdicts"), py::arg("drafts"), py::arg("offer"), py::arg("sequence"),
           py::arg("drawn"), py::arg("draft_records"));

  bind_answer<GraphSession>(m, "GraphSession")
      .def(py::init([](std::shared_ptr<Lanes> lanes, const Graphs& graphs, std::vector<int> prompt, int keep, int first,
                       const std::variant<Schedule, std::shared_ptr<AlonePolicy>>& schedule, const Limits& limits,
                       uint64_t seed, bool in_turns, bool report_drafts,
                       bool trace, double before, std::optional<OwnedNgrams> ngrams) {
             GraphRequest request;
             request.prompt = std::move(prompt);
             request.keep = keep, request.first = first;
             if (const auto* fixed = std::get_if<Schedule>(&schedule)) request.schedule = *fixed;
             else request.policy = std::get<std::shared_ptr<AlonePolicy>>(schedule);
             request.limits = limits;
             request.ngrams = ngrams.value_or(OwnedNgrams());
             request.seed = seed, request.in_turns = in_turns, request.report_drafts = report_drafts;
             auto session = std::make_unique<PyAnswer<GraphSession>>();
             session->before = before;
             if (trace) session->trace.reset(new Trace);
             session->session = {new GraphSession(std::move(lanes), graphs, std::move(request), session->trace.get()), WithoutLock()};
             return session;
           }),
           py::kw_only(), py::arg("lanes"), py::arg("graphs"), py::arg("prompt"), py::arg("keep"), py::arg("first"),
           py::arg("schedule"), py::arg("limits"), py::arg("seed"), py::arg("in_turns"), py::arg("report_drafts"),
           py::arg("trace"), py::arg("before"), py::arg("ngrams"))
      .def("end", &PyAnswer<GraphSession>::stop);

  py::class_<AlonePolicy, std::shared_ptr<AlonePolicy>>(m, "AlonePolicy")
      .def(py::init([](double prior, bool overlaps) {
             return std::shared_ptr<AlonePolicy>(new AlonePolicy(prior, overlaps), NotAfterFork());   // a session may be in it
           }),
           py::arg("prior"), py::arg("overlaps"))
      .def("begin", &AlonePolicy::begin, py::arg("asked"), py::arg("pool"))
      .def("explain", &AlonePolicy::explain);
}
