// ppsd_rt's dataclasses where our functions take and give structs; values.cpp is the only place that knows their fields.
// The dataclasses are the public types: the torch reference uses them without this extension.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "../cpu/model.h"
#include "../cpu/sampler.h"
#include "../core/schedule.h"
#include "../core/trace.h"

namespace ppsd::bindings {

// False: it is an object of another class. Throw Python's UsageError for values that have no counterpart here.
bool read(pybind11::handle from, ModelShape* to);   // LlamaConfig
bool read(pybind11::handle from, Sampling* to);   // SamplingParams
bool read(pybind11::handle from, Schedule* to);
bool read(pybind11::handle from, Limits* to);
bool read(pybind11::handle from, Oracle* to);

// Of a Python object with `fill(start, ids, rows, address of the bits)`, see ppsd_rt/sampling/grammar.py.
std::shared_ptr<TokenMask> token_mask_of(pybind11::object mask);
// What `masks(grammar)` gives, which may be None; from a thread that decodes.
std::shared_ptr<TokenMask> token_mask_from(const pybind11::object& masks, int grammar);
// Python that a thread which decodes calls. Garbage collection may come by, and drop an answer that this thread works on.
class Callback {
 public:
  Callback();
  ~Callback();

 private:
  const pybind11::gil_scoped_acquire acquire_;
};
bool in_callback();   // is this a thread that decodes, and asks Python for something?
// A Round or a Drafted. seconds: Round's.
pybind11::object logprob_of(const Logprobs& logprobs);
pybind11::object event_of(const Event& event, std::optional<double> seconds = std::nullopt);
pybind11::list trace_spans(const Trace* trace);

}  // namespace ppsd::bindings

namespace pybind11::detail {

template <class Value, const auto& kClass>
struct dataclass_caster {
  PYBIND11_TYPE_CASTER(Value, kClass);
  bool load(handle from, bool) { return ppsd::bindings::read(from, &value); }
};

inline constexpr auto kLlamaConfig = const_name("LlamaConfig");
inline constexpr auto kSamplingParams = const_name("SamplingParams");
inline constexpr auto kSchedule = const_name("Schedule");
inline constexpr auto kLimits = const_name("Limits");
inline constexpr auto kOracle = const_name("Oracle");
template <> struct type_caster<ppsd::ModelShape> : dataclass_caster<ppsd::ModelShape, kLlamaConfig> {};
template <> struct type_caster<ppsd::Sampling> : dataclass_caster<ppsd::Sampling, kSamplingParams> {};
template <> struct type_caster<ppsd::Schedule> : dataclass_caster<ppsd::Schedule, kSchedule> {};
template <> struct type_caster<ppsd::Limits> : dataclass_caster<ppsd::Limits, kLimits> {};
template <> struct type_caster<ppsd::Oracle> : dataclass_caster<ppsd::Oracle, kOracle> {};

}  // namespace pybind11::detail
