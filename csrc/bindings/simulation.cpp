// A toy model's answers in simulated time.
#include "bindings.h"

#include <pybind11/stl.h>

#include "../pipeline/replanning.h"
#include "../pipeline/simulated.h"
#include "../pipeline/toy_stages.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

// ([(seconds, event)], tokens, spans). steering: a planner knows the costs that it was made with, not these.
py::tuple simulate(const Steering& steering, int tokens, std::vector<double> acceptance, double second, uint64_t seed,
                   const StageCosts& costs, bool trace) {
  Toy toy(tokens, std::move(acceptance), seed, costs.verify.size(), second);
  const auto spans = trace ? std::make_unique<Trace>() : nullptr;
  const auto* planner = std::get_if<std::shared_ptr<Planner>>(&steering);
  if (planner) (*planner)->begin(Toy::kPrompt);
  Replanning replanning(planner ? *planner : nullptr);
  Simulated* clock = nullptr;
  double before = 0.0;
  const auto after_round = [&](const Round& round, Scheduler* scheduler) {
    replanning.after(round, clock->seconds() - std::exchange(before, clock->seconds()), scheduler);
    return true;
  };
  Simulated carrier(toy.stages(), planner ? (*planner)->schedule() : std::get<Schedule>(steering), toy.limits, seed, costs,
                    false, after_round, spans.get());
  clock = &carrier;
  carrier.begin(Toy::prompt(), 0);
  py::list events;
  while (auto event = carrier.next()) events.append(py::make_tuple(carrier.seconds(), event_of(*event)));
  return py::make_tuple(events, carrier.tokens(), trace_spans(spans.get()));
}

}  // namespace

void bind_simulation(py::module_& m) {
  m.def("simulate", &simulate, py::kw_only(), py::arg("schedule"), py::arg("tokens"), py::arg("acceptance"),
        py::arg("second"), py::arg("seed"), py::arg("costs"), py::arg("trace"));
}
