// A toy model's answers in simulated time.
#include "bindings.h"

#include <pybind11/stl.h>

#include "../pipeline/simulated.h"
#include "../pipeline/toy_stages.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

std::pair<py::list, std::vector<int>> ppsd::bindings::in_simulated_time(const Steering& steering, const Stages& stages,
    const std::vector<int>& prompt, const Limits& limits, uint64_t seed, const StageCosts& costs, OwnedNgrams ngrams, Trace* trace) {
  const auto* planner = std::get_if<std::shared_ptr<Planner>>(&steering);
  if (planner) (*planner)->begin(int(prompt.size()));
  bool left_over = false;   // rows that have left before overlapping ended are still under way
  const auto after_round = [&](const Round& round, double seconds, Scheduler* scheduler) {
    if (!planner || scheduler->finished()) return;
    const bool overlapped = left_over || scheduler->schedule().overlap;
    const Schedule& next = (*planner)->after(round, seconds, left_over);
    left_over = overlapped && !next.overlap && scheduler->in_flight();
    scheduler->set_schedule(next);
  };
  Simulated carrier(stages, planner ? (*planner)->schedule() : std::get<Schedule>(steering), limits, seed, costs, after_round, trace);
  carrier.remember(std::move(ngrams));
  carrier.begin(prompt, 0);
  py::list events;
  while (auto round = carrier.next()) events.append(py::make_tuple(carrier.seconds(), event_of(Event(*round))));
  return {events, carrier.tokens()};
}

namespace {

// ([(seconds, event)], tokens, spans)
py::tuple simulate(const Steering& steering, int tokens, std::vector<double> acceptance, double second, uint64_t seed,
                   const StageCosts& costs, bool trace) {
  Toy toy(tokens, std::move(acceptance), seed, costs.verify.size(), second);
  const auto spans = trace ? std::make_unique<Trace>() : nullptr;
  const auto [events, text] = in_simulated_time(steering, toy.stages(), Toy::prompt(), toy.limits, seed, costs, {}, spans.get());
  return py::make_tuple(events, text, trace_spans(spans.get()));
}

}  // namespace

void bind_simulation(py::module_& m) {
  m.def("simulate", &simulate, py::kw_only(), py::arg("schedule"), py::arg("tokens"), py::arg("acceptance"),
        py::arg("second"), py::arg("seed"), py::arg("costs"), py::arg("trace"));
}
