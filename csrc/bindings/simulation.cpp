// A toy model's answers in simulated time.
#include "bindings.h"

#include <pybind11/stl.h>

#include "../pipeline/simulated.h"
#include "../pipeline/toy_stages.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

// A toy model's answer in simulated time: ([(seconds, event)], tokens, spans).
py::tuple simulate(const Schedule& schedule, int tokens, std::vector<double> acceptance, uint64_t seed,
                   const StageCosts& costs, bool trace) {
  Toy toy(tokens, std::move(acceptance), seed, costs.verify.size());
  const auto spans = trace ? std::make_unique<Trace>() : nullptr;
  Simulated carrier(toy.stages(), schedule, toy.limits, seed, costs, false, nullptr, spans.get());
  carrier.begin(Toy::prompt(), 0);
  py::list events;
  while (auto event = carrier.next()) events.append(py::make_tuple(carrier.seconds(), event_of(*event)));
  return py::make_tuple(events, carrier.tokens(), trace_spans(spans.get()));
}

}  // namespace

void bind_simulation(py::module_& m) {
  m.def("simulate", &simulate, py::kw_only(), py::arg("schedule"), py::arg("tokens"), py::arg("acceptance"),
        py::arg("seed"), py::arg("costs"), py::arg("trace"));
}
