// What the files of bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <variant>

#include "cpu/stage.h"
#include "pipeline/carrier.h"

namespace ppsd::bindings {

// A model, and the arrays that it was packed from: the embedding stays where it is.
struct PyModel {
  std::shared_ptr<CpuModel> model;
  pybind11::dict arrays;
};

Schedule schedule_of(const pybind11::dict& values);
pybind11::object event_of(const Event& event);

}  // namespace ppsd::bindings

void bind_ranks(pybind11::module_& m);
