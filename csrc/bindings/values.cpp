#include "values.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>

#include <algorithm>
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

bool read(py::handle from, ModelShape* to) {
  if (!is(from, "ppsd_rt.models.config", "LlamaConfig")) return false;
  to->vocab_size = from.attr("vocab_size").cast<int>();
  to->hidden_size = from.attr("hidden_size").cast<int>();
  to->intermediate_size = from.attr("intermediate_size").cast<int>();
  to->num_layers = from.attr("num_hidden_layers").cast<int>();
  to->num_heads = from.attr("num_attention_heads").cast<int>();
  to->num_kv_heads = from.attr("num_key_value_heads").cast<int>();
  to->head_dim = from.attr("head_dim").cast<int>();
  to->rms_norm_eps = from.attr("rms_norm_eps").cast<float>();
  to->attention.clear();
  for (const py::handle layer : from.attr("layer_attention"))
    to->attention.push_back({layer.attr("rotary").cast<bool>(), layer.attr("window").cast<std::optional<int>>().value_or(0)});
  return true;
}

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
    judged[i] = types.draft(draft.token, draft.confidence, draft.copied);
  }
  py::tuple logprobs(round.logprobs.size());
  for (size_t i = 0; i < round.logprobs.size(); ++i)
    logprobs[i] = logprob_of(round.logprobs[i]);
  return types.round(round.epoch, round.position, round.rows, py::tuple(py::cast(round.committed)), judged, round.accepted,
                     round.dropped, round.prompt, logprobs, seconds);
}

py::list trace_spans(const Trace* trace) {
  py::list spans;
  if (trace != nullptr)
    for (const Trace::Span& span : trace->spans())
      spans.append(py::make_tuple(span.name, span.track, span.rows, span.begin_us, span.end_us));
  return spans;
}

}  // namespace ppsd::bindings
