// Planning: what stages cost, and answers in simulated time.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <map>

#include "../core/simulated.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

// -- costs -------------------------------------------------------------------------------------------------------------

double number_of(const py::handle& value, const char* name) {
  if (PyBool_Check(value.ptr()) || !(PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr())))
    throw std::invalid_argument(std::string("a cost that cannot be: ") + name + " of " + std::string(py::str(value)).substr(0, 40));
  const double number = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred() == nullptr) return number;
  PyErr_Clear();   // a whole number that is too great
  return std::numeric_limits<double>::infinity();
}

bool is_sequence(const py::handle& value) { return py::isinstance<py::sequence>(value) && !py::isinstance<py::str>(value); }

std::vector<double> numbers_of(const py::handle& values, const char* name) {
  std::vector<double> numbers;
  if (!is_sequence(values)) return {number_of(values, name)};
  for (const py::handle& value : values) numbers.push_back(number_of(value, name));
  return numbers;
}

// One table, or one for each verification stage.
std::vector<RowTable> tables_of(const py::handle& values, const char* name) {
  std::vector<RowTable> tables;
  const bool several = is_sequence(values) && py::len(values) > 0 && is_sequence(*py::iter(values));
  if (!several) return {RowTable(numbers_of(values, name))};
  for (const py::handle& table : values) tables.emplace_back(numbers_of(table, name));
  return tables;
}

py::tuple tuple_of(const std::vector<double>& values) { return py::tuple(py::cast(values)); }

// Nothing deepens where all numbers are 0.
std::vector<RowTable> slopes_of(const py::handle& values) {
  std::vector<RowTable> tables = tables_of(values, "verify_deeper");
  for (RowTable& table : tables)
    if (table.size() >= kMaxRows && table.seconds() == std::vector<double>(size_t(table.size()))) table = RowTable();
  return tables;
}

// What is not given costs nothing: one machine needs no links and no interference.
constexpr std::pair<const char*, double StageCosts::*> kOptional[] = {
    {"first_draft", &StageCosts::first_draft}, {"plain", &StageCosts::plain}, {"step_deeper", &StageCosts::step_deeper},
    {"link_row", &StageCosts::link_row}, {"draft_interference", &StageCosts::draft_interference},
    {"verify_interference", &StageCosts::verify_interference}};

StageCosts stages_of(const py::object& row_step, const py::object& draft_step, const py::object& verify, const py::kwargs& others) {
  StageCosts costs;
  if (is_sequence(row_step)) {
    costs.steps = RowTable(numbers_of(row_step, "row_step"));
    if (!costs.steps.empty()) costs.row_step = costs.steps(1);
  } else {
    costs.row_step = number_of(row_step, "row_step");
  }
  costs.draft_step = number_of(draft_step, "draft_step");
  for (RowTable& table : tables_of(verify, "verify")) costs.verify.push_back({std::move(table), {}});
  for (const auto& [key, value] : others) {
    const auto name = key.cast<std::string>();
    const auto known = std::find_if(std::begin(kOptional), std::end(kOptional), [&](const auto& each) { return name == each.first; });
    if (known != std::end(kOptional)) {
      costs.*known->second = number_of(value, known->first);
    } else if (name == "verify_deeper") {
      const std::vector<RowTable> deeper = slopes_of(value);
      if (deeper.size() != costs.verify.size())
        throw std::invalid_argument("a cost that cannot be: verify_deeper of another number of stages than verify");
      for (size_t stage = 0; stage < deeper.size(); ++stage) costs.verify[stage].deeper = deeper[stage];
    } else if (name == "links") {
      if (is_sequence(value)) costs.links = numbers_of(value, "links");
      else costs.links.assign(costs.verify.size() + 1, number_of(value, "links"));
    } else {
      throw py::type_error("StageCosts has no " + name);
    }
  }
  check(costs);
  return costs;
}

py::object tables_of(const StageCosts& costs, RowTable PassCosts::*which) {
  py::list tables;
  for (const PassCosts& stage : costs.verify) {
    const RowTable& table = stage.*which;
    tables.append(tuple_of(table.empty() ? std::vector<double>(kMaxRows) : table.seconds()));
  }
  return tables;
}

py::dict dict_of(const StageCosts& costs) {
  py::dict out;
  const bool one = costs.stages() == 1;
  const py::object verify = tables_of(costs, &PassCosts::seconds), deeper = tables_of(costs, &PassCosts::deeper);
  out["row_step"] = costs.steps.empty() ? py::object(py::float_(costs.row_step)) : tuple_of(costs.steps.seconds());
  out["draft_step"] = costs.draft_step;
  out["verify"] = one ? py::object(verify[py::int_(0)]) : verify;
  out["first_draft"] = costs.first_draft;
  out["plain"] = costs.plain;
  out["step_deeper"] = costs.step_deeper;
  out["verify_deeper"] = one ? py::object(deeper[py::int_(0)]) : deeper;
  if (!costs.links.empty()) out["links"] = tuple_of(costs.links);
  if (costs.link_row != 0.0) out["link_row"] = costs.link_row;
  if (costs.draft_interference != 1.0) out["draft_interference"] = costs.draft_interference;
  if (costs.verify_interference != 1.0) out["verify_interference"] = costs.verify_interference;
  return out;
}

py::dict dict_of(const Costs& costs) {
  py::dict out;
  out["turns"] = dict_of(costs.turns);
  out["overlapped"] = costs.overlapped ? py::object(dict_of(*costs.overlapped)) : py::none();
  out["crowded"] = costs.crowded;
  return out;
}

// A pass through all verification stages, without links: seconds by the number of rows.
py::tuple work_of(const StageCosts& costs) {
  std::vector<double> sum(costs.verify.front().seconds.seconds());
  for (size_t stage = 1; stage < costs.verify.size(); ++stage)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += costs.verify[stage].seconds(int(i) + 1);
  return tuple_of(sum);
}

void bind_costs(py::module_& m) {
  attributes(py::class_<StageCosts>(m, "StageCosts"), "row_step", &StageCosts::row_step, "draft_step", &StageCosts::draft_step,
             "first_draft", &StageCosts::first_draft, "plain", &StageCosts::plain, "step_deeper", &StageCosts::step_deeper,
             "link_row", &StageCosts::link_row)
      .def(py::init(&stages_of), py::arg("row_step"), py::arg("draft_step"), py::arg("verify"))
      .def_readonly_static("CONTEXT", &StageCosts::kContext)
      .def_property_readonly("links", [](const StageCosts& costs) { return tuple_of(costs.links); })
      .def_property_readonly("verify", &work_of)
      .def_property_readonly("stages", [](const StageCosts& costs) { return py::tuple(tables_of(costs, &PassCosts::seconds)); })
      .def_property_readonly("verify_deeper", [](const StageCosts& costs) { return py::object(dict_of(costs)["verify_deeper"]); })
      .def_property_readonly("plain_step", &StageCosts::plain_step)
      .def("step", &StageCosts::step, py::arg("rows"), py::arg("draw"))
      .def("round", [](const StageCosts& costs, int drafts) { return costs.round(drafts, drafts + 1); }, py::arg("drafts"))
      .def("draft_share", &StageCosts::draft_share, py::arg("drafts"))
      .def("after", &StageCosts::after, py::arg("context"))
      .def("replace", [](const StageCosts& costs, const py::kwargs& changes) {
        py::dict values = dict_of(costs);
        for (const auto& [name, value] : changes) values[name] = value;
        return py::type::of<StageCosts>()(**values);
      })
      .def_static("between", [](const std::map<int, double>& measured, int rows) {
        if (measured.empty()) throw std::invalid_argument("a table needs at least one number of rows that was measured");
        return tuple_of(RowTable::between(measured, rows).seconds());
      }, py::arg("measured"), py::arg("rows") = kMaxRows)
      .def("to_dict", [](const StageCosts& costs) { return dict_of(costs); })
      .def("__eq__", [](const StageCosts& a, const StageCosts& b) { return a == b; }, py::is_operator())
      .def("__repr__", [](const StageCosts& costs) { return "StageCosts(**" + std::string(py::repr(dict_of(costs))) + ")"; });
  attributes(py::class_<Costs>(m, "Costs"), "turns", &Costs::turns, "overlapped", &Costs::overlapped, "crowded", &Costs::crowded)
      .def(py::init([](const StageCosts& turns, const std::optional<StageCosts>& overlapped, bool crowded) {
             Costs costs{turns, overlapped, crowded};
             check(costs);
             return costs;
           }),
           py::arg("turns"), py::arg("overlapped") = py::none(), py::arg("crowded").noconvert() = false)
      .def_property_readonly("plain_seconds", &Costs::plain)
      .def("to_dict", [](const Costs& costs) { return dict_of(costs); })
      .def("__eq__", [](const Costs& a, const Costs& b) { return a == b; }, py::is_operator())
      .def("__repr__", [](const Costs& costs) { return "Costs(**" + std::string(py::repr(dict_of(costs))) + ")"; });
}

// -- simulated time ----------------------------------------------------------------------------------------------------

// ([(seconds, event)], tokens, spans) of a random text
py::tuple simulate(const Schedule& schedule, int tokens, const std::vector<double>& acceptance, uint64_t seed,
                   const StageCosts& costs, bool trace) {
  const auto spans = trace ? std::make_unique<Trace>() : nullptr;
  const auto [events, text] = in_simulated_time(schedule, random_answer(tokens, acceptance, seed), seed, costs, {}, spans.get());
  return py::make_tuple(events, text, trace_spans(spans.get()));
}

}  // namespace

std::pair<py::list, std::vector<int>> ppsd::bindings::in_simulated_time(const Schedule& schedule, KnownAnswer answer, uint64_t seed,
                                                                        const StageCosts& costs, OwnedNgrams ngrams, Trace* trace) {
  Simulated simulated(std::move(answer), schedule, seed, costs, std::move(ngrams), {}, trace);
  py::list events;
  while (auto round = simulated.next()) events.append(py::make_tuple(simulated.seconds(), event_of(Event(*round))));
  return {events, simulated.tokens()};
}

void bind_planning(py::module_& m) {
  bind_costs(m);
  py::class_<OwnedNgrams>(m, "Ngrams")
      .def(py::init([](size_t bytes, uint32_t clock) { return OwnedNgrams{std::make_shared<Ngrams>(bytes, clock)}; }),
           py::arg("bytes") = Ngrams::kBytes, py::arg("clock") = uint32_t(1) << 31)
      .def("of", [](const OwnedNgrams& ngrams, std::optional<uint64_t> owner) { return OwnedNgrams{ngrams.all, owner}; }, py::arg("owner"))
      .def("know", [](const OwnedNgrams& ngrams, const py::array_t<int32_t, py::array::c_style | py::array::forcecast>& rows) {
             if (rows.ndim() != 2 || rows.shape(1) != 4) throw std::invalid_argument("rows of four numbers each");
             std::vector<std::array<int, 4>> counted;
             for (py::ssize_t i = 0; i < rows.shape(0); ++i)
               counted.push_back({rows.at(i, 0), rows.at(i, 1), rows.at(i, 2), rows.at(i, 3)});
             ngrams.all->know(counted);
           }, py::arg("counted"))
      .def("learn", [](const OwnedNgrams& ngrams, const std::vector<int>& tokens) {
             const py::gil_scoped_release release;
             ngrams.all->learn(tokens, 0, 0, ngrams.all->begin(ngrams.owner.value()));
           }, py::arg("tokens"));
  m.def("simulate", &simulate, py::kw_only(), py::arg("schedule"), py::arg("tokens"), py::arg("acceptance"),
        py::arg("seed"), py::arg("costs"), py::arg("trace"));
}
