#include "values.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>

namespace py = pybind11;

namespace ppsd::bindings {
namespace {

constexpr int kMostRows = std::numeric_limits<int>::max() - 64;   // that positions can count

bool is(py::handle value, const char* module, const char* type) {
  return py::isinstance(value, py::module_::import(module).attr(type));
}

// A whole number that no text and no vocabulary reaches is as good as `most`.
int at_most(const py::object& number, int most) {
  return PyObject_RichCompareBool(number.ptr(), py::int_(most).ptr(), Py_GT) == 1 ? most : number.cast<int>();
}

template <class Value>
void read_if_there(py::handle from, const char* name, Value* to) {
  if (py::hasattr(from, name)) *to = from.attr(name).cast<Value>();
}

StopRule stop_rule_of(const py::object& rule) {
  static const std::pair<const char*, StopRule::Kind> kKinds[] = {{"fixed", StopRule::Kind::kFixed},
                                                                  {"confidence", StopRule::Kind::kConfidence},
                                                                  {"beta", StopRule::Kind::kBeta},
                                                                  {"calibrated", StopRule::Kind::kCalibrated},
                                                                  {"survival", StopRule::Kind::kSurvival},
                                                                  {"paying", StopRule::Kind::kPaying}};
  const std::string kind = py::str(py::getattr(rule, "kind", py::str("without a kind")));
  const auto found = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const auto& known) { return kind == known.first; });
  if (found == std::end(kKinds)) {
    const py::object error = py::module_::import("ppsd_rt.errors").attr("UsageError");
    PyErr_SetString(error.ptr(), ("stop rule " + kind + " is unknown; CONTRIBUTING.md says how to add one").c_str());
    throw py::error_already_set();
  }
  StopRule read;
  read.kind = found->second;
  read_if_there(rule, "threshold", &read.threshold);
  read_if_there(rule, "discount", &read.discount);
  read_if_there(rule, "bins", &read.bins);
  read_if_there(rule, "weight", &read.weight);
  read_if_there(rule, "copy_threshold", &read.copy_threshold);
  read_if_there(rule, "thresholds", &read.thresholds);
  read_if_there(rule, "copy_thresholds", &read.copy_thresholds);
  read_if_there(rule, "cost", &read.cost);
  return read;
}

// The number whose shortest text is that of a float: 0.7, not 0.699999988.
double shortest(float value) {
  char text[32];
  for (int digits = 6; digits <= 9; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, double(value));
    if (std::strtof(text, nullptr) == value) break;
  }
  return std::strtod(text, nullptr);
}

thread_local int callbacks = 0;   // that this thread is in

// A Python object with `fill(start, ids, rows, address of the bits)`, asked in the threads of stages.
class PyTokenMask final : public TokenMask {
 public:
  explicit PyTokenMask(py::object mask) : mask_(std::move(mask)) {}
  ~PyTokenMask() override {
    const Callback callback;
    mask_ = {};
  }
  void fill(int start, const std::vector<int>& ids, int rows, uint32_t* bits) override {
    const Callback callback;
    try {
      mask_.attr("fill")(start, ids, rows, reinterpret_cast<uintptr_t>(bits));
    } catch (const py::error_already_set& error) {   // which lives no longer than the lock
      throw MaskFailed(py::str(error.value()).cast<std::string>());
    }
  }

 private:
  py::object mask_;
};

struct EventTypes {
  py::object draft, drafted, logprob, round;
};

const EventTypes& event_types() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<EventTypes> storage;
  return storage
      .call_once_and_store_result([] {
        const auto rounds = py::module_::import("ppsd_rt.pipeline.rounds");
        return EventTypes{rounds.attr("Draft"), rounds.attr("Drafted"), rounds.attr("Logprob"), rounds.attr("Round")};
      })
      .get_stored();
}

}  // namespace

bool read(py::handle from, Sampling* to) {
  if (!is(from, "ppsd_rt.sampling.params", "SamplingParams")) return false;
  to->temperature = from.attr("temperature").cast<float>();
  to->top_k = at_most(from.attr("top_k"), std::numeric_limits<int>::max());
  to->top_p = from.attr("top_p").cast<float>();
  to->min_p = from.attr("min_p").cast<float>();
  to->repetition_penalty = from.attr("repetition_penalty").cast<float>();
  to->presence_penalty = from.attr("presence_penalty").cast<float>();
  to->frequency_penalty = from.attr("frequency_penalty").cast<float>();
  to->logit_bias = from.attr("logit_bias").cast<std::vector<std::pair<int, float>>>();
  to->min_tokens = at_most(from.attr("min_tokens"), kMostRows);
  to->logprobs = from.attr("logprobs").cast<std::optional<int>>().value_or(-1);
  to->seed = from.attr("seed").cast<std::optional<uint64_t>>().value_or(0);
  return true;
}

bool read(py::handle from, Schedule* to) {
  if (!is(from, "ppsd_rt.pipeline.schedule", "Schedule")) return false;
  to->first_chunk = from.attr("first_chunk").cast<int>();
  to->max_chunk = from.attr("max_chunk").cast<int>();
  to->lookahead = from.attr("lookahead").cast<int>();
  to->overlap = from.attr("overlap").cast<bool>();
  to->lookup = from.attr("lookup").cast<int>();
  to->recycle = from.attr("recycle").cast<bool>();
  to->siblings = from.attr("siblings").cast<double>();
  to->stop_rule = stop_rule_of(from.attr("stop_rule"));
  return true;
}

bool read(py::handle from, Limits* to) {
  if (!is(from, "ppsd_rt.pipeline.rounds", "Limits")) return false;
  to->end = at_most(from.attr("end"), kMostRows);
  to->stop_ids.clear();
  for (const py::handle id : from.attr("stop_ids")) to->stop_ids.push_back(id.cast<int>());
  std::sort(to->stop_ids.begin(), to->stop_ids.end());
  to->own = from.attr("own").cast<int>();
  return true;
}

bool read(py::handle from, Oracle* to) {
  if (!is(from, "ppsd_rt.backend", "Oracle")) return false;
  to->truth = from.attr("truth").cast<std::vector<int>>();
  to->acceptance = from.attr("acceptance").cast<double>();
  to->second = from.attr("second").cast<double>();
  to->seed = from.attr("seed").cast<uint64_t>();
  return true;
}

bool in_callback() { return callbacks > 0; }
Callback::Callback() { ++callbacks; }
Callback::~Callback() { --callbacks; }

std::shared_ptr<TokenMask> token_mask_of(py::object mask) { return std::make_shared<PyTokenMask>(std::move(mask)); }

std::shared_ptr<TokenMask> token_mask_from(const py::object& masks, int grammar) {
  const Callback callback;
  py::object mask = masks(grammar);
  return mask.is_none() ? nullptr : token_mask_of(std::move(mask));
}

py::object sampling_params_of(const Sampling& s) {
  using py::literals::operator""_a;
  py::dict biases;
  for (const auto& [id, bias] : s.logit_bias) biases[py::int_(id)] = shortest(bias);
  return py::module_::import("ppsd_rt.sampling.params")
      .attr("SamplingParams")("temperature"_a = shortest(s.temperature), "top_k"_a = s.top_k, "top_p"_a = shortest(s.top_p),
                              "min_p"_a = shortest(s.min_p), "repetition_penalty"_a = shortest(s.repetition_penalty),
                              "presence_penalty"_a = shortest(s.presence_penalty),
                              "frequency_penalty"_a = shortest(s.frequency_penalty), "logit_bias"_a = biases,
                              "logprobs"_a = s.logprobs < 0 ? py::object(py::none()) : py::int_(s.logprobs),
                              "max_tokens"_a = py::none(), "min_tokens"_a = s.min_tokens,
                              "stop_token_ids"_a = s.stop_ids, "seed"_a = s.seed);
}

py::object schedule_of(const Schedule& s) {
  using py::literals::operator""_a;
  const py::object rule = py::module_::import("ppsd_rt.pipeline.stop_rules")
      .attr("Survival")("threshold"_a = s.stop_rule.threshold, "copy_threshold"_a = s.stop_rule.copy_threshold,
                        "thresholds"_a = py::tuple(py::cast(s.stop_rule.thresholds)),
                        "copy_thresholds"_a = py::tuple(py::cast(s.stop_rule.copy_thresholds)));
  return py::module_::import("ppsd_rt.pipeline.schedule")
      .attr("Schedule")("first_chunk"_a = s.first_chunk, "max_chunk"_a = s.max_chunk, "lookahead"_a = s.lookahead,
                        "overlap"_a = s.overlap, "stop_rule"_a = rule, "lookup"_a = s.lookup, "siblings"_a = s.siblings,
                        "recycle"_a = s.recycle);
}

py::object logprob_of(const Logprobs& logprobs) {
  return event_types().logprob(logprobs.own, py::tuple(py::cast(logprobs.top)));
}

py::object event_of(const Event& event, std::optional<double> seconds) {
  const EventTypes& types = event_types();
  if (const auto* drafted = std::get_if<Drafted>(&event)) return types.drafted(drafted->position, drafted->token);
  const Round& round = std::get<Round>(event);
  py::tuple judged(round.judged.size());
  for (size_t i = 0; i < round.judged.size(); ++i) {
    const Draft& draft = round.judged[i];
    judged[i] = types.draft(draft.token, draft.confidence, draft.copied, draft.sibling);
  }
  py::tuple logprobs(round.logprobs.size());
  for (size_t i = 0; i < round.logprobs.size(); ++i)
    logprobs[i] = logprob_of(round.logprobs[i]);
  return types.round(round.epoch, round.position, round.rows, py::tuple(py::cast(round.committed)), judged, round.accepted,
                     round.dropped, round.prompt, round.siblings, round.rescued, logprobs, seconds);
}

py::list trace_spans(const Trace* trace) {
  py::list spans;
  if (trace != nullptr)
    for (const Trace::Span& span : trace->spans())
      spans.append(py::make_tuple(span.name, span.track, span.rows, span.begin_us, span.end_us));
  return spans;
}

}  // namespace ppsd::bindings
