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

// Attributes, into members: name, member, name, member ... all: none may be missing.
template <bool all = true, class Value, class... Others>
void read_fields(py::handle from, const char* name, Value* to, Others... others) {
  if (all || py::hasattr(from, name)) *to = from.attr(name).cast<Value>();
  if constexpr (sizeof...(others) > 0) read_fields<all>(from, others...);
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
  read_fields<false>(rule, "threshold", &read.threshold, "discount", &read.discount, "bins", &read.bins, "weight", &read.weight,
                     "copy_threshold", &read.copy_threshold, "thresholds", &read.thresholds, "cost", &read.cost,
                     "copy_thresholds", &read.copy_thresholds);
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
  read_fields(from, "vocab_size", &to->vocab_size, "hidden_size", &to->hidden_size, "intermediate_size", &to->intermediate_size,
              "num_hidden_layers", &to->num_layers, "num_attention_heads", &to->num_heads, "num_key_value_heads", &to->num_kv_heads,
              "head_dim", &to->head_dim, "rms_norm_eps", &to->rms_norm_eps);
  to->attention.clear();
  for (const py::handle layer : from.attr("layer_attention"))
    to->attention.push_back({layer.attr("rotary").cast<bool>(), layer.attr("window").cast<std::optional<int>>().value_or(0)});
  return true;
}

bool read(py::handle from, Sampling* to) {
  if (!is(from, "ppsd_rt.sampling.params", "SamplingParams")) return false;
  read_fields(from, "temperature", &to->temperature, "top_p", &to->top_p, "min_p", &to->min_p, "logit_bias", &to->logit_bias,
              "repetition_penalty", &to->repetition_penalty, "presence_penalty", &to->presence_penalty,
              "frequency_penalty", &to->frequency_penalty);
  to->top_k = at_most(from.attr("top_k"), std::numeric_limits<int>::max());
  to->min_tokens = at_most(from.attr("min_tokens"), kMostRows);
  to->logprobs = from.attr("logprobs").cast<std::optional<int>>().value_or(-1);
  to->seed = from.attr("seed").cast<std::optional<uint64_t>>().value_or(0);
  return true;
}

bool read(py::handle from, Schedule* to) {
  if (!is(from, "ppsd_rt.pipeline.schedule", "Schedule")) return false;
  read_fields(from, "first_chunk", &to->first_chunk, "max_chunk", &to->max_chunk, "lookahead", &to->lookahead,
              "overlap", &to->overlap, "lookup", &to->lookup, "recycle", &to->recycle);
  to->stop_rule = stop_rule_of(from.attr("stop_rule"));
  return true;
}

bool read(py::handle from, Limits* to) {
  if (!is(from, "ppsd_rt.pipeline.rounds", "Limits")) return false;
  to->end = at_most(from.attr("end"), kMostRows);
  to->stop_ids.clear();
  for (const py::handle id : from.attr("stop_ids")) to->stop_ids.push_back(id.cast<int>());
  std::sort(to->stop_ids.begin(), to->stop_ids.end());
  read_fields(from, "own", &to->own);
  return true;
}

bool read(py::handle from, Oracle* to) {
  if (!is(from, "ppsd_rt.backend", "Oracle")) return false;
  read_fields(from, "truth", &to->truth, "acceptance", &to->acceptance, "seed", &to->seed);
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
