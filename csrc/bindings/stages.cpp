// The stages of one text, for a loop in Python.
#include "bindings.h"

#include <pybind11/stl.h>

#include "../decoding/text_stages.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

void bind_stages(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<TextStages>(m, "Stages",
                         "The stages of one text with KV caches and threads of their own, for ppsd_rt.stages.Stages, which "
                         "checks every argument.\n\nA call with `start` voids the rows that are held from there on.")
      .def(py::init([](const PyModel& model, int threads, const Sampling& sampling) {
             return std::make_unique<TextStages>(std::make_unique<CpuPasses>(model.model, make_shared_team(threads)), sampling);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("threads"), py::arg("sampling"))
      .def_static("of_passes", [](py::object passes, const Sampling& sampling) {
             return std::make_unique<TextStages>(passes_of(std::move(passes)), sampling);
           }, py::arg("passes"), py::arg("sampling"), "A Python object computes, see ppsd_rt/reference/passes.py.")
      .def("begin", &TextStages::begin, release, py::arg("answer"), py::arg("key"),
           "A new text, of which the answer begins at position `answer`; all rows are void. key: of its noise.")
      .def("reserve", &TextStages::reserve, release, py::arg("capacity"),
           "Make room for `capacity` rows; those that are held stay.")
      .def("draft", &TextStages::draft, release, py::arg("start"), py::arg("ids"), py::arg("draw"),
           "Rows `ids` at positions start.. through the early layers; draw: -> (token, confidence) of the exit head on the "
           "last row, else None.")
      .def("verify", &TextStages::verify, release, py::arg("start"), py::arg("ids"), py::arg("last"),
           "Rows that draft() ran, through the verification layers -> the model's own id after each of the `last` rows.")
      .def("learn", &TextStages::learn, release, py::arg("position"),
           "The verified row at `position` is the newest committed one: feedback heads receive its last hidden state.");
}
