// Stages for ranks: passes come in and go out as int32 arrays, which Python sends and receives. Nothing here holds the
// interpreter lock while it waits.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "../loop/cpu_passes.h"
#include "../stages/pass_stage.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

using Words = py::array_t<int32_t, py::array::c_style>;

}  // namespace

void bind_ranks(py::module_& m) {
  m.attr("WIRE_VERSION") = kWireVersion;
  m.def("precise_waits", &precise_waits);
  m.def("sleep_until", [](int64_t clock) {
    std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(clock)));
  }, py::arg("clock"), py::call_guard<py::gil_scoped_release>());
  m.def("drafting_block_bytes", [](const PyModel& model) {
    return CpuPasses(model.model, std::make_unique<Team>(1, std::vector<int>()), {}, false).block_bytes();
  }, py::arg("model"));

  py::class_<CpuStation>(m, "Station")
      .def(py::init([](const PyModel& model, int first, int last, std::vector<int> cores, int threads, size_t kv_bytes,
                       const std::vector<int>& taps) {
             return std::make_unique<CpuStation>(model.model, first, last, std::move(cores), threads, kv_bytes, taps);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("first"), py::arg("last"), py::arg("cores"), py::arg("threads"),
           py::arg("kv_bytes") = 0, py::arg("taps") = std::vector<int>())
      .def_property_readonly("blocks", [](CpuStation& rank) { return rank.passes().blocks(); })
      .def("post", [](CpuStation& rank, const Words& message) {
        const py::gil_scoped_release release;
        rank.inbox().post(message.data(), size_t(message.size()));
      }, py::arg("message"))
      .def("work", [](CpuStation& rank, Words out, int milliseconds) {
             if (size_t(out.size()) < most_pass_words(rank.hidden(), rank.taps()))
               throw std::runtime_error("a pass does not fit");
             int32_t* place = out.mutable_data();
             const py::gil_scoped_release release;
             return rank.inbox().work(place, milliseconds);
           }, py::arg("out"), py::arg("milliseconds"))
      .def("close", [](CpuStation& rank) { rank.inbox().close(); })
      .def("busy_seconds", [](CpuStation& rank) { return rank.inbox().busy_seconds(); })
      .def_property_readonly("passes", [](CpuStation& rank) { return rank.inbox().passes(); })
      .def("spans", [](CpuStation& rank) { return trace_spans(rank.inbox().trace().get()); })
      .def("use_masks", [](CpuStation& rank, py::object masks) {
             rank.passes().use([masks = std::move(masks)](int grammar) { return token_mask_from(masks, grammar); });
           }, py::arg("masks"))
      .def("pin", &CpuStation::pin)
      .def("time_pass", [](CpuStation& rank, int rows, int context) { return rank.passes().time(rows, context); }, py::arg("rows"), py::arg("context"), py::call_guard<py::gil_scoped_release>());
}
