// What the files of bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <variant>

#include "cpu/stage.h"
#include "pipeline/carrier.h"
#include "pipeline/thread.h"

namespace ppsd::bindings {

// A model, and the arrays that it was packed from: the embedding stays where it is.
struct PyModel {
  std::shared_ptr<CpuModel> model;
  pybind11::dict arrays;
};

Sampling sampling_of(const pybind11::dict& values);
Schedule schedule_of(const pybind11::dict& values);
pybind11::object event_of(const Event& event);
pybind11::list trace_spans(const Trace* trace);

// An answer: iterate with next(); waiting lets Python's signals through, so Ctrl-C works.
template <class Answer>
struct PyAnswer {
  std::unique_ptr<Trace, NotAfterFork> trace;
  std::shared_ptr<Answer> session;   // shared with a thread that waits in next() while another one closes
  double seconds = 0.0;               // at the last event, see Answer::next
  uint32_t made = forks();

  bool here() const { return made == forks(); }
  pybind11::object next() {
    if (!here()) throw std::runtime_error("this answer was begun before a fork: begin it again in this process");
    for (;;) {
      Event event;
      typename Answer::Status status;
      const std::shared_ptr<Answer> held = session;
      if (!held) throw pybind11::stop_iteration();   // closed
      {
        const pybind11::gil_scoped_release release;
        status = held->next(50, &event, &seconds);
      }
      if (status == Answer::Status::kEvent) return event_of(event);
      if (status == Answer::Status::kEnded) throw pybind11::stop_iteration();
      if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    }
  }
  void cancel() {
    const std::shared_ptr<Answer> held = session;
    if (!held || !here()) return;
    const pybind11::gil_scoped_release release;
    held->cancel();
  }
  void close() {
    const std::shared_ptr<Answer> held = session;
    if (!held || !here()) return;
    {
      const pybind11::gil_scoped_release release;   // several threads may close, and all of them wait for the end
      held->end();
    }
    session = nullptr;
  }
  pybind11::list spans() const { return trace_spans(here() ? trace.get() : nullptr); }
};

}  // namespace ppsd::bindings

void bind_cuda(pybind11::module_& m);
void bind_ranks(pybind11::module_& m);
void bind_stages(pybind11::module_& m);
