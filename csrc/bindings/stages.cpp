// The stages of one text, for a loop in Python.
#include "bindings.h"

#include <pybind11/stl.h>

#include "../decoding/text_stages.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

void bind_stages(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<TextStages>(m, "Stages")
      .def(py::init([](const PyModel& model, int threads, const Sampling& sampling) {
             return std::make_unique<TextStages>(std::make_unique<CpuPasses>(model.model, make_shared_team(threads)), sampling);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("threads"), py::arg("sampling"))
      .def_static("of_passes", [](py::object passes, const Sampling& sampling) {
             return std::make_unique<TextStages>(passes_of(std::move(passes)), sampling);
           }, py::arg("passes"), py::arg("sampling"))
      .def("begin", &TextStages::begin, release, py::arg("answer"), py::arg("key"))
      .def("reserve", &TextStages::reserve, release, py::arg("capacity"))
      .def("draft", &TextStages::draft, release, py::arg("start"), py::arg("ids"), py::arg("draw"))
      .def("verify", &TextStages::verify, release, py::arg("start"), py::arg("ids"), py::arg("last"))
      .def("learn", &TextStages::learn, release, py::arg("position"));
}
