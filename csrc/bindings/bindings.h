// What the files of bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <variant>

#include "../loop/engine.h"
#include "../loop/loop.h"
#include "../core/thread.h"
#include "values.h"

namespace ppsd::bindings {

// A model, and the arrays that it was packed from: the embedding stays where it is.
struct PyModel {
  std::shared_ptr<const CpuModel> model;
  pybind11::dict arrays;
};

// An array of 16 or 32 bits, or Blocks; it must outlive the tensor. Throws std::runtime_error that names it.
Tensor tensor_of(const pybind11::handle& value, const std::string& name);

// An engine and the arrays that its model reads from.
struct PyEngine {
  PyModel model;
  std::unique_ptr<CpuEngine, NotAfterFork> engine;
};

// Attributes that Python reads: name, member, name, member ...
template <class Class, class Member, class... Others>
Class attributes(Class type, const char* name, Member member, Others... others) {
  type.def_readonly(name, member);
  if constexpr (sizeof...(others) > 0) attributes(type, others...);
  return type;
}

// Ends threads, and what is the driver's, without the interpreter lock, which a thread may wait for to ask a grammar; and in its own
// process alone.
struct WithoutLock {
  NotAfterFork end;
  template <class Answer>
  void operator()(Answer* answer) const {
    std::optional<pybind11::gil_scoped_release> release;
    if (PyGILState_Check()) release.emplace();
    end(answer);
  }
};

// A loop, in a thread of its own or stepped by hand.
struct PyLoop {
  PyModel model;
  std::unique_ptr<LoopThread, WithoutLock> thread;   // or
  std::unique_ptr<Loop, WithoutLock> stepped;
  uint32_t made = forks();

  Loop& loop() {
    if (made != forks()) throw std::runtime_error("this loop was made before a fork: make another one in this process");
    return thread ? thread->loop() : *stepped;
  }
};

// That a Python object computes, see ppsd_rt/reference/passes.py.
std::unique_ptr<ModelBackend> passes_of(pybind11::object passes);

inline bool on_main_thread() {
  const auto threading = pybind11::module_::import("threading");
  return threading.attr("current_thread")().is(threading.attr("main_thread")());
}

// An answer: iterate with next(); waiting lets Python's signals through, so Ctrl-C works.
template <class Answer>
struct PyAnswer {
  std::shared_ptr<Trace> trace;
  std::shared_ptr<Answer> session;   // shared with a thread that waits in next() while another one closes
  double before = 0.0;   // seconds of the answer's work before the session began
  uint32_t made = forks();

  bool here() const { return made == forks(); }
  pybind11::object next() {
    if (!here()) throw std::runtime_error("this answer was begun before a fork: begin it again in this process");
    for (int patience = 50;;) {
      Event event;
      double seconds = 0.0;
      const std::shared_ptr<Answer> held = session;
      if (!held) throw pybind11::stop_iteration();   // closed
      // What is there already comes without a change of threads: the lock is held for moments, and never for Python.
      typename Answer::Status status = held->next(0, &event, &seconds);
      if (status == Answer::Status::kWaiting) {
        const pybind11::gil_scoped_release release;
        status = held->next(patience, &event, &seconds);
      }
      if (status == Answer::Status::kEvent) return event_of(event, before + seconds);
      if (status == Answer::Status::kEnded) throw pybind11::stop_iteration();
      if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
      if (!on_main_thread()) patience = 1000;   // signals are none of its business
    }
  }
  void cancel() {
    const std::shared_ptr<Answer> held = session;
    if (!held || !here()) return;
    const pybind11::gil_scoped_release release;
    held->cancel();
  }
  void stop() {
    const std::shared_ptr<Answer> held = session;
    if (!held || !here()) return;
    const pybind11::gil_scoped_release release;   // several threads may stop it, and all of them wait for the end
    held->end();
  }
  void close() {
    stop();
    if (here()) session = nullptr;
  }
  bool ready(int milliseconds) const {
    const std::shared_ptr<Answer> held = session;
    if (!held || !here()) return true;   // next() says why
    if (milliseconds == 0) return held->ready(0);
    const pybind11::gil_scoped_release release;
    return held->ready(milliseconds);
  }
  std::pair<int, int> prompt_rows() const { return session && here() ? session->prompt_rows() : std::make_pair(0, 0); }
  pybind11::list spans() const { return trace_spans(here() ? trace.get() : nullptr); }
};

template <class Answer>
pybind11::class_<PyAnswer<Answer>> bind_answer(pybind11::module_& m, const char* name) {
  using Py = PyAnswer<Answer>;
  return pybind11::class_<Py>(m, name)
      .def("__iter__", [](Py& answer) -> Py& { return answer; })
      .def("__next__", &Py::next)
      .def("cancel", &Py::cancel)
      .def("close", &Py::close)
      .def("spans", &Py::spans);
}

}  // namespace ppsd::bindings

void bind_cpu(pybind11::module_& m);
void bind_decoding(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_ranks(pybind11::module_& m);
extern void (*bind_testing)(pybind11::module_& m);   // null where csrc/tests/bindings.cpp, which sets it, is not linked
