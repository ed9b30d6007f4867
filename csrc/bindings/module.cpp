// The Python module ppsd_rt._native. What its callers see is typed and described in ppsd_rt/_native.pyi.
#include "bindings.h"

void (*bind_testing)(pybind11::module_&) = nullptr;

PYBIND11_MODULE(_native, m) {
  m.doc() = "The C++ half of ppsd_rt: kernels, CPU stages, scheduler.";
  pybind11::register_exception<ppsd::NoThread>(m, "NoThread", PyExc_RuntimeError).doc() = "The system starts no more threads.";
  pybind11::register_exception<ppsd::MaskFailed>(m, "MaskFailed", PyExc_RuntimeError).doc() = "A grammar gives up.";
  bind_cpu(m);
  bind_decoding(m);
  bind_cuda(m);
  bind_ranks(m);
  if (bind_testing == nullptr) return;
  pybind11::module_ testing = m.def_submodule("testing", "What only tests and benchmarks call.");
  bind_testing(testing);
}
