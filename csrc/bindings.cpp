// The Python module ppsd_rt._native. What its callers see is typed and described in ppsd_rt/_native.pyi.
#include "bindings.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>

#include "cpu/batch.h"
#include "cpu/calibrate.h"
#include "cpu/cores.h"
#include "cpu/importance.h"
#include "cpu/measure.h"
#include "cpu/session.h"
#include "pipeline/planner.h"
#include "pipeline/simulated.h"
#include "pipeline/toy_stages.h"

namespace py = pybind11;
using namespace ppsd;

namespace ppsd::bindings {

// -- from Python's data to ours ----------------------------------------------------------------------------------------

Stored stored_as(const py::dtype& dtype, const std::string& name) {
  if (dtype.is(py::dtype::of<float>())) return Stored::kFp32;
  if (dtype.kind() == 'f' && dtype.itemsize() == 4) return Stored::kFp32;
  if (dtype.kind() == 'f' && dtype.itemsize() == 2) return Stored::kFp16;
  if (dtype.kind() == 'u' && dtype.itemsize() == 2) return Stored::kBf16;
  throw std::runtime_error("tensor " + name + " has dtype " + std::string(py::str(dtype)) + "; expected 16 or 32 bits");
}

// A tensor of a dict of arrays, checked for its shape; absent if it may be.
Tensor tensor_of(const py::dict& arrays, const std::string& name, int64_t rows, int64_t columns, bool required = true) {
  if (!arrays.contains(name)) {
    if (required) throw std::runtime_error("tensor " + name + " is missing");
    return {};
  }
  const auto array = py::array::ensure(arrays[name.c_str()]);
  const bool vector = columns == 1;
  const bool fits = array && array.ndim() == (vector ? 1 : 2) && array.shape(0) == rows &&
                    (vector || array.shape(1) == columns) && (array.flags() & py::array::c_style);
  if (!fits) throw std::runtime_error("tensor " + name + " is not a dense array of the expected shape");
  Tensor tensor{array.data(), stored_as(array.dtype(), name), rows, columns, false};
  tensor.mapped = py::isinstance(arrays[name.c_str()], py::module_::import("numpy").attr("memmap"));   // `array` never is
  return tensor;
}

LayerTensors layer_of(const py::dict& arrays, const std::string& prefix, const ModelShape& s, bool mlp) {
  LayerTensors t;
  const auto get = [&](const std::string& name, int64_t rows, int64_t columns, bool required) {
    return tensor_of(arrays, prefix + name, rows, columns, required);
  };
  t.input_norm = get("input_layernorm.weight", s.hidden_size, 1, true);
  t.q = get("self_attn.q_proj.weight", s.q_outputs(), s.hidden_size, true);
  t.k = get("self_attn.k_proj.weight", s.kv_outputs(), s.hidden_size, true);
  t.v = get("self_attn.v_proj.weight", s.kv_outputs(), s.hidden_size, true);
  t.o = get("self_attn.o_proj.weight", s.hidden_size, s.q_outputs(), true);
  t.q_bias = get("self_attn.q_proj.bias", s.q_outputs(), 1, false);
  t.k_bias = get("self_attn.k_proj.bias", s.kv_outputs(), 1, t.q_bias.present());
  t.v_bias = get("self_attn.v_proj.bias", s.kv_outputs(), 1, t.q_bias.present());
  t.o_bias = get("self_attn.o_proj.bias", s.hidden_size, 1, false);
  if (mlp) {
    t.post_norm = get("post_attention_layernorm.weight", s.hidden_size, 1, true);
    t.gate = get("mlp.gate_proj.weight", s.intermediate_size, s.hidden_size, true);
    t.up = get("mlp.up_proj.weight", s.intermediate_size, s.hidden_size, true);
    t.down = get("mlp.down_proj.weight", s.hidden_size, s.intermediate_size, true);
  }
  if (t.q.stored != t.k.stored || t.q.stored != t.v.stored || t.gate.stored != t.up.stored)
    throw std::runtime_error(prefix + ": tensors that are packed together differ in dtype");
  return t;
}

Format format_of(const std::string& name) {
  if (name == "float32") return Format::kFp32;
  if (name == "bfloat16") return Format::kBf16;
  if (name == "int8") return Format::kInt8;
  if (name == "int4") return Format::kInt4;
  throw std::runtime_error("format " + name + " is unknown; formats are float32, bfloat16, int8, int4");
}

std::string layer_prefix(int layer) { return "model.layers." + std::to_string(layer) + "."; }

using FloatArray = py::array_t<float, py::array::c_style>;

// How much each input of each layer's matrices matters: [layers][InputOffsets::width], of these token ids as a text.
FloatArray importance_of(const ModelShape& shape, const py::dict& arrays, const std::vector<float>& frequencies,
                         const std::vector<int>& ids, int threads) {
  const Tensor embedding = tensor_of(arrays, "model.embed_tokens.weight", shape.vocab_size, shape.hidden_size);
  std::vector<LayerTensors> layers;
  for (int i = 0; i < shape.num_layers; ++i) layers.push_back(layer_of(arrays, layer_prefix(i), shape, true));
  FloatArray out({shape.num_layers, InputOffsets(shape).width});
  float* to = out.mutable_data();
  const py::gil_scoped_release release;
  measure_importance(pick_kernels(), shape, layers, embedding, frequencies, ids, threads, to);
  return out;
}

// importance: null; or as importance_of gives it
PyModel make_model(const ModelShape& shape, const py::dict& arrays, const std::vector<float>& frequencies,
                   const std::string& format, const std::string& kv, int threads, int first, int last, bool lm_head,
                   const std::optional<FloatArray>& importance) {
  auto model = std::make_shared<CpuModel>();
  model->kernels = &pick_kernels();
  model->shape = shape;
  model->format = format_of(format);
  model->kv = kv == "float32" ? Stored::kFp32 : kv == "int8" ? Stored::kInt8 : Stored::kBf16;
  if (model->kv == Stored::kInt8 && !KvCache::takes_int8(shape.head_dim))
    throw std::runtime_error("an int8 KV cache needs a head_dim that is a multiple of 32 and 256 at most");
  model->frequencies = frequencies;
  if (shape.hidden_size % kBlock || shape.intermediate_size % kBlock || shape.q_outputs() % kBlock || shape.head_dim % kPanel)
    throw std::runtime_error("the cpu backend needs hidden and intermediate sizes that are multiples of 32 and a head_dim "
                             "that is a multiple of 16; use --backend torch");
  model->embedding = tensor_of(arrays, "model.embed_tokens.weight", shape.vocab_size, shape.hidden_size);
  const bool tied = !arrays.contains("lm_head.weight");
  const Tensor head = tied ? model->embedding : tensor_of(arrays, "lm_head.weight", shape.vocab_size, shape.hidden_size);
  if (last < 0) last = shape.num_layers;
  if (first < 0 || first > last || last > shape.num_layers) throw std::runtime_error("there are no such layers");
  std::vector<LayerTensors> layers;
  for (int i = first; i < last; ++i)
    layers.push_back(layer_of(arrays, layer_prefix(i), shape, true));
  const Tensor norm = tensor_of(arrays, "model.norm.weight", shape.hidden_size, 1);
  const int width = InputOffsets(shape).width;
  if (importance && (importance->ndim() != 2 || importance->shape(0) != shape.num_layers || importance->shape(1) != width))
    throw std::runtime_error("the importance of the inputs is that of a model of another shape");
  const float* weights = importance ? importance->data() : nullptr;
  const auto of_layer = [&](int i) { return weights ? weights + size_t(i) * width : nullptr; };

  const py::gil_scoped_release release;
  Team team(threads, {});
  const Packer packer(*model->kernels, model->format, shape, &team);
  size_t bytes = lm_head ? packer.lm_head_bytes() : 0;
  for (const LayerTensors& layer : layers) bytes += packer.layer_bytes(layer);
  model->memory.emplace_back(bytes);
  model->packed_bytes = bytes;
  uint8_t* memory = model->memory.back().as<>();
  model->layers.resize(size_t(shape.num_layers));
  for (int i = first; i < last; ++i)
    model->layers[i] = named("layer " + std::to_string(i), [&] { return packer.layer(layers[i - first], &memory, of_layer(i)); });
  model->head.norm = named("the final norm", [&] { return Packer::vector(norm); });
  if (lm_head) model->head.lm_head = named("the LM head", [&] { return packer.lm_head(head, &memory); });
  return {std::move(model), arrays};
}

// The same model with an exit head; the weights of the model itself are shared.
PyModel with_exit_head(const PyModel& base, int exit_layer, const py::dict& arrays, const std::vector<int>& draft_ids,
                       const std::string& format, int threads) {
  auto model = std::make_shared<CpuModel>();
  const CpuModel& from = *base.model;
  model->kernels = from.kernels;
  model->shape = from.shape;
  model->format = from.format;
  model->kv = from.kv;
  model->embedding = from.embedding;
  model->frequencies = from.frequencies;
  model->layers = from.layers;
  model->head = from.head;
  model->packed_bytes = from.packed_bytes;
  model->base = base.model;
  model->exit_layer = exit_layer;
  model->exit_format = format_of(format);
  model->draft_ids = draft_ids;
  const ModelShape& shape = from.shape;
  std::vector<LayerTensors> layers;
  for (int i = 0; arrays.contains("layers." + std::to_string(i) + ".input_layernorm.weight"); ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    layers.push_back(layer_of(arrays, prefix, shape, arrays.contains(prefix + "mlp.gate_proj.weight")));
  }
  std::vector<Tensor> distances;
  for (int d = 1; arrays.contains("feedback." + std::to_string(d) + ".weight"); ++d)
    distances.push_back(
        tensor_of(arrays, "feedback." + std::to_string(d) + ".weight", shape.hidden_size, shape.hidden_size));
  const Tensor feedback_norm = tensor_of(arrays, "feedback.norm.weight", shape.hidden_size, 1, !distances.empty());
  const Tensor norm = tensor_of(arrays, "norm.weight", shape.hidden_size, 1);
  const Tensor lm_head = base.arrays.contains("lm_head.weight")
                             ? tensor_of(base.arrays, "lm_head.weight", shape.vocab_size, shape.hidden_size)
                             : from.embedding;

  const py::gil_scoped_release release;
  Team team(threads, {});
  const Packer packer(*model->kernels, model->exit_format, shape, &team);
  size_t bytes = draft_ids.empty() ? 0 : packer.matrix_bytes(int(draft_ids.size()), shape.hidden_size);
  for (const LayerTensors& layer : layers) bytes += packer.layer_bytes(layer);
  bytes += distances.size() * packer.matrix_bytes(shape.hidden_size, shape.hidden_size);
  model->memory.emplace_back(bytes);
  model->packed_bytes += bytes;
  uint8_t* memory = model->memory.back().as<>();
  for (const LayerTensors& layer : layers) model->exit_layers.push_back(packer.layer(layer, &memory));
  if (!distances.empty()) model->exit_feedback.norm = Packer::vector(feedback_norm);
  for (const Tensor& distance : distances) model->exit_feedback.distances.push_back(packer.matrix(distance, &memory));
  model->exit_head.norm = Packer::vector(norm);
  model->exit_head.lm_head = draft_ids.empty() ? from.head.lm_head : packer.draft_head(lm_head, draft_ids, &memory);
  return {std::move(model), base.arrays};
}

Sampling sampling_of(const py::dict& values) {
  Sampling sampling;
  sampling.temperature = values["temperature"].cast<float>();
  sampling.top_k = values["top_k"].cast<int>();
  sampling.top_p = values["top_p"].cast<float>();
  sampling.min_p = values["min_p"].cast<float>();
  sampling.repetition_penalty = values["repetition_penalty"].cast<float>();
  sampling.seed = values["seed"].cast<uint64_t>();
  return sampling;
}

Schedule schedule_of(const py::dict& values) {
  Schedule schedule;
  schedule.first_chunk = values["first_chunk"].cast<int>();
  schedule.max_chunk = values["max_chunk"].cast<int>();
  schedule.lookahead = values["lookahead"].cast<int>();
  schedule.overlap = values["overlap"].cast<bool>();
  schedule.lookup = values["lookup"].cast<int>();
  schedule.siblings = values["siblings"].cast<double>();
  const py::dict rule = values["stop_rule"];
  const auto kind = rule["kind"].cast<std::string>();
  schedule.stop_rule.kind = kind == "confidence"   ? StopRule::Kind::kConfidence
                            : kind == "beta"       ? StopRule::Kind::kBeta
                            : kind == "calibrated" ? StopRule::Kind::kCalibrated
                            : kind == "survival"   ? StopRule::Kind::kSurvival
                                                   : StopRule::Kind::kFixed;
  if (rule.contains("threshold")) schedule.stop_rule.threshold = rule["threshold"].cast<double>();
  if (rule.contains("discount")) schedule.stop_rule.discount = rule["discount"].cast<double>();
  if (rule.contains("bins")) schedule.stop_rule.bins = rule["bins"].cast<int>();
  if (rule.contains("copy_threshold")) schedule.stop_rule.copy_threshold = rule["copy_threshold"].cast<double>();
  if (rule.contains("weight")) schedule.stop_rule.weight = rule["weight"].cast<double>();
  return schedule;
}

py::object event_of(const Event& event) {
  if (const auto* drafted = std::get_if<Drafted>(&event)) return py::make_tuple(drafted->position, drafted->token);
  const Round& round = std::get<Round>(event);
  py::list judged;
  for (const Draft& draft : round.judged)
    judged.append(py::make_tuple(draft.token, draft.confidence, draft.copied, draft.sibling));
  return py::make_tuple(round.epoch, round.position, round.rows, py::tuple(py::cast(round.committed)), judged,
                        round.accepted, round.dropped, round.prompt, round.siblings, round.rescued);
}

py::list trace_spans(const Trace* trace) {
  py::list spans;
  if (trace != nullptr)
    for (const Trace::Span& span : trace->spans())
      spans.append(py::make_tuple(span.name, span.track, span.rows, span.begin_us, span.end_us));
  return spans;
}

}  // namespace ppsd::bindings

using namespace ppsd::bindings;

// -- the module --------------------------------------------------------------------------------------------------------

namespace {

// An engine and the arrays that its model reads from.
struct PyEngine {
  PyModel model;
  std::unique_ptr<CpuEngine, NotAfterFork> engine;
};

using PySession = PyAnswer<Session>;

// One step of all texts: -> chosen [texts], kept [texts, kinds, hidden] bfloat16 bits.
template <class T>
using Column = py::array_t<T, py::array::c_style>;

py::tuple batch_step(CpuBatch& batch, const Column<int32_t>& ids, const Column<int32_t>& positions,
                     const Column<float>& inverse_temperatures, const Column<uint64_t>& seeds) {
  const py::ssize_t texts = batch.texts();
  if (ids.size() != texts || positions.size() != texts || inverse_temperatures.size() != texts || seeds.size() != texts)
    throw std::runtime_error("a step takes one row of each of the " + std::to_string(texts) + " texts");
  std::vector<BatchRow> rows;
  for (py::ssize_t i = 0; i < texts; ++i)
    rows.push_back({ids.data()[i], positions.data()[i], inverse_temperatures.data()[i], seeds.data()[i]});
  py::array_t<int32_t> chosen(texts);
  py::array_t<uint16_t> kept({texts, py::ssize_t(batch.kept()), py::ssize_t(batch.hidden_size())});
  {
    int32_t* to = chosen.mutable_data();
    uint16_t* states = kept.mutable_data();
    const py::gil_scoped_release release;
    batch.step(rows.data(), to, states);
  }
  return py::make_tuple(chosen, kept);
}

// Stages made of Python functions, for comparing the lock-step carrier with ppsd_rt/reference/pipeline.py: one thread,
// and the interpreter lock is held throughout.
class PyDraftStage final : public DraftStage {
 public:
  explicit PyDraftStage(py::function draw) : draw_(std::move(draw)) {}

  bool step(const DraftStep& step, Draft* draft, const Cancelled&) override {
    if (step.start > int(ids_.size())) throw std::runtime_error("a draft step left a gap");
    ids_.resize(step.start);
    ids_.insert(ids_.end(), step.ids.begin(), step.ids.end());
    if (draft != nullptr) {
      const auto [token, confidence, sibling, sibling_confidence] = draw_(ids_).cast<std::tuple<int, double, int, double>>();
      *draft = {token, confidence, 0, -1, 0.0};
      if (step.sibling_bar > 0.0 && 1.0 - confidence >= step.sibling_bar)
        draft->sibling = sibling, draft->sibling_confidence = sibling_confidence;
    }
    for (const Sibling& sibling : step.siblings) siblings_[sibling.position] = sibling.id;
    return true;
  }
  void export_hidden(Chunk* chunk) override {   // the hidden state of a row is its token
    if (chunk->start + chunk->rows() > int(ids_.size())) throw std::runtime_error("rows that have not been run");
    chunk->hidden.assign(ids_.begin() + chunk->start, ids_.begin() + chunk->start + chunk->rows());
    for (const Sibling& sibling : chunk->siblings) chunk->hidden.push_back(float(siblings_.at(sibling.position)));
  }
  void adopt(const Sibling& sibling) override {
    ids_.resize(sibling.position);
    ids_.push_back(siblings_.at(sibling.position));
  }

 private:
  py::function draw_;
  std::vector<int> ids_;
  std::map<int, int> siblings_;   // by position
};

class PyVerifyStage final : public VerifyStage {
 public:
  explicit PyVerifyStage(py::function truth) : truth_(std::move(truth)) {}

  bool run(Chunk* chunk, const Cancelled&) override {
    if (chunk->start > int(ids_.size())) throw std::runtime_error("a chunk left a gap");
    ids_.resize(chunk->start);
    ids_.insert(ids_.end(), chunk->hidden.begin(), chunk->hidden.begin() + chunk->rows());
    for (int i = 0; i < int(chunk->siblings.size()); ++i)
      siblings_[chunk->siblings[i].position] = int(chunk->hidden[chunk->rows() + i]);
    return true;
  }
  std::vector<int> choose(const Chunk& chunk, int last) override {
    std::vector<int> chosen;
    for (int end = chunk.start + chunk.rows() - last; end < chunk.start + chunk.rows(); ++end)
      chosen.push_back(truth_(std::vector<int>(ids_.begin(), ids_.begin() + end + 1)).cast<int>());
    for (const Sibling& sibling : chunk.siblings) {
      std::vector<int> text(ids_.begin(), ids_.begin() + sibling.position);
      text.push_back(siblings_.at(sibling.position));
      chosen.push_back(truth_(text).cast<int>());
    }
    return chosen;
  }
  void adopt(const Sibling& sibling) override {
    ids_.resize(sibling.position);
    ids_.push_back(siblings_.at(sibling.position));
  }

 private:
  py::function truth_;
  std::vector<int> ids_;
  std::map<int, int> siblings_;   // by position
};

py::list lock_step_events(const std::vector<int>& prompt, py::function draw, py::function truth, const py::dict& schedule,
                          const Limits& limits, uint64_t seed, int stages, int per_stage) {
  PyDraftStage draft(std::move(draw));
  PyVerifyStage verify(std::move(truth));
  LockStep carrier({&draft, {&verify}}, schedule_of(schedule), limits, seed, {stages, per_stage}, true);
  carrier.begin(prompt, 0);
  py::list events;
  while (auto event = carrier.next()) events.append(event_of(*event));
  return events;
}

// The stages of a toy model whose answer to a prompt of one token is `tokens` long behind the prompt's own.
struct Toy {
  static constexpr int kPrompt = 1;
  Limits limits;
  ToyDraft draft;
  std::vector<std::unique_ptr<ToyVerify>> verify;

  Toy(int tokens, std::vector<double> acceptance, uint64_t seed, size_t stages)
      : limits{kPrompt + 1 + tokens, {}}, draft({seed}, limits.end, std::move(acceptance), seed) {
    for (size_t stage = 0; stage < stages; ++stage)
      verify.push_back(std::make_unique<ToyVerify>(ToyModel{seed}, limits.end, int(stage)));
  }
  Stages stages() {
    Stages stages{&draft, {}};
    for (const auto& stage : verify) stages.verify.push_back(stage.get());
    return stages;
  }
  static std::vector<int> prompt() { return std::vector<int>(kPrompt, 0); }
};

// -- planning ----------------------------------------------------------------------------------------------------------

py::dict dict_of(const Costs::Stages& stages) {
  py::dict out;
  out["row_step"] = stages.row_step;
  out["draft_step"] = stages.draft_step;
  out["verify"] = std::vector<double>(stages.verify.begin() + 1, stages.verify.end());
  out["first_draft"] = stages.first_draft;
  out["plain"] = stages.plain;
  out["step_deeper"] = stages.step_deeper;
  out["verify_deeper"] = std::vector<double>(stages.verify_deeper.begin() + 1, stages.verify_deeper.end());
  return out;
}

Costs::Stages stages_of(const py::dict& values) {
  Costs::Stages stages;
  stages.row_step = values["row_step"].cast<double>();
  stages.draft_step = values["draft_step"].cast<double>();
  stages.first_draft = values["first_draft"].cast<double>();
  stages.plain = values["plain"].cast<double>();
  stages.step_deeper = values["step_deeper"].cast<double>();
  const auto verify = values["verify"].cast<std::array<double, kMaxRows>>();
  std::copy(verify.begin(), verify.end(), stages.verify.begin() + 1);
  const auto deeper = values["verify_deeper"].cast<std::array<double, kMaxRows>>();
  std::copy(deeper.begin(), deeper.end(), stages.verify_deeper.begin() + 1);
  return stages;
}

Costs costs_of(const py::dict& values) {
  Costs costs;
  costs.turns = stages_of(values["turns"]);
  costs.can_overlap = !values["overlapped"].is_none();
  if (costs.can_overlap) costs.overlapped = stages_of(values["overlapped"]);
  check(costs);
  return costs;
}

py::dict dict_of(const Costs& costs) {
  py::dict out;
  out["turns"] = dict_of(costs.turns);
  out["overlapped"] = costs.can_overlap ? py::object(dict_of(costs.overlapped)) : py::none();
  out["crowded"] = costs.crowded;
  return out;
}

// For tests: made-up stages and a made-up clock, the methods of a Python object.
class PyBench : public Bench {
 public:
  explicit PyBench(const py::object& bench) : bench_(bench) {}
  double now() override { return ask<double>("now"); }
  double draft(bool draw) override { return ask<double>("draft", draw); }
  double verify(int rows, int context) override { return ask<double>("verify", rows, context); }
  bool short_handed() override { return ask<bool>("short_handed"); }
  void work_on(int stage) override {
    const py::gil_scoped_acquire acquire;
    bench_.attr("work_on")(stage);
  }

 private:
  template <class Answer, class... Values>
  Answer ask(const char* name, Values... values) {
    const py::gil_scoped_acquire acquire;
    return bench_.attr(name)(values...).template cast<Answer>();
  }
  const py::object& bench_;
};

const char* name_of(Prediction::Mode mode) {
  return mode == Prediction::Mode::kPlain ? "plain" : mode == Prediction::Mode::kTurns ? "turns" : "overlap";
}

// A toy model's answer in simulated time: ([(seconds, event)], tokens, spans).
py::tuple simulate(const py::dict& schedule, int tokens, std::vector<double> acceptance, uint64_t seed,
                   const SimulatedCosts::Table& step, const SimulatedCosts::Table& drawing_step,
                   std::vector<SimulatedCosts::Table> verify, std::vector<double> links, double link_row,
                   std::pair<double, double> interference, bool trace) {
  Toy toy(tokens, std::move(acceptance), seed, verify.size());
  SimulatedCosts costs{step,     drawing_step,       std::move(verify),  std::move(links),
                       link_row, interference.first, interference.second};
  const auto spans = trace ? std::make_unique<Trace>() : nullptr;
  Simulated carrier(toy.stages(), schedule_of(schedule), toy.limits, seed, std::move(costs), false, nullptr, spans.get());
  carrier.begin(Toy::prompt(), 0);
  py::list events;
  while (auto event = carrier.next()) events.append(py::make_tuple(carrier.seconds(), event_of(*event)));
  return py::make_tuple(events, carrier.tokens(), trace_spans(spans.get()));
}

// The same in lock-step: [(tick, event)].
py::list lock_step_toy(const py::dict& schedule, int tokens, std::vector<double> acceptance, uint64_t seed, int stages,
                       int per_stage) {
  Toy toy(tokens, std::move(acceptance), seed, size_t(stages));
  LockStep carrier(toy.stages(), schedule_of(schedule), toy.limits, seed, {stages, per_stage}, false);
  carrier.begin(Toy::prompt(), 0);
  py::list events;
  while (auto event = carrier.next()) events.append(py::make_tuple(carrier.tick(), event_of(*event)));
  return events;
}

// The draws of a stop rule over a history of verdicts, for comparing it with its twin.
std::vector<bool> stop_rule_draws(const py::dict& schedule, uint64_t seed,
                                  const std::vector<std::variant<double, std::vector<std::pair<double, bool>>>>& history) {
  const auto controller = Controller::make(schedule_of(schedule).stop_rule, seed);
  std::vector<bool> draws;
  for (const auto& item : history) {
    if (const double* confidence = std::get_if<double>(&item)) {
      draws.push_back(controller->stop(*confidence));
    } else {
      std::vector<Judged> verdict;
      for (const auto& [confidence, accepted] : std::get<1>(item)) verdict.push_back({confidence, accepted});
      controller->observe(verdict);
    }
  }
  return draws;
}

// A pass of `seconds` beside other programs that leave `room` members a core: if more are at work, they sleep for a share
// `lost` of it waiting for the others.
Team::Pass crowded_pass(int active, int room, double seconds, double lost) {
  return {seconds, active > room ? lost * seconds * (active - 1) : 0.0};
}

// How many members would work, and whether on cores of their own, after each of these passes.
std::vector<std::pair<int, bool>> roster(int size, bool pinnable, double seconds, double lost, const std::vector<int>& room) {
  Roster roster(size, pinnable);
  std::vector<std::pair<int, bool>> after;
  for (const int fit : room) {
    const Team::Pass pass = crowded_pass(roster.active(), fit, seconds, lost);
    roster.after(pass.seconds, pass.slept);
    after.emplace_back(roster.active(), roster.pinned());
  }
  return after;
}

// An engine's teams from now on find such passes, room[i] in turn and over again -> how often each number of members
// has worked, counted as they go on.
struct Crowd {
  std::mutex mutex;   // teams work at the same time
  size_t passes = 0;
  std::map<int, int> worked;
};

std::shared_ptr<Crowd> crowd(CpuEngine* engine, double seconds, double lost, const std::vector<int>& room) {
  auto crowd = std::make_shared<Crowd>();
  engine->judge_by([crowd, seconds, lost, room](int active) {
    const std::lock_guard<std::mutex> lock(crowd->mutex);
    ++crowd->worked[active];
    return crowded_pass(active, room[crowd->passes++ % room.size()], seconds, lost);
  });
  return crowd;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "The C++ half of ppsd_rt: kernels, CPU stages, scheduler.";
  m.def("isa", [] { return std::string(pick_kernels().name); });
  m.def("usable_isas", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable_kernels()) names.push_back(kernels->name);
    return names;
  });
  m.def("usable_cores", [](const std::string& system) { return usable_cores(system).order; }, py::arg("system") = kDevices);
  m.def("best_cores", [](const std::string& system) { return usable_cores(system).best; }, py::arg("system") = kDevices);
  m.attr("PASS_ROWS") = kPassRows;
  m.def("read_bandwidth", &read_bandwidth, py::arg("threads"), py::arg("megabytes"), py::call_guard<py::gil_scoped_release>());
  m.def("kernel_names", &kernel_names);

  py::class_<ModelShape>(m, "ModelShape",
      "The sizes of a Llama model, as the kernels take them; tensors are checked against it.")
      .def(py::init([](int vocab_size, int hidden_size, int intermediate_size, int num_layers, int num_heads,
                       int num_kv_heads, int head_dim, float rms_norm_eps) {
             ModelShape shape;
             shape.vocab_size = vocab_size;
             shape.hidden_size = hidden_size;
             shape.intermediate_size = intermediate_size;
             shape.num_layers = num_layers;
             shape.num_heads = num_heads;
             shape.num_kv_heads = num_kv_heads;
             shape.head_dim = head_dim;
             shape.rms_norm_eps = rms_norm_eps;
             return shape;
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("hidden_size"), py::arg("intermediate_size"),
           py::arg("num_layers"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
           py::arg("rms_norm_eps"));

  m.def("importance", &importance_of, py::arg("shape"), py::arg("tensors"), py::arg("frequencies"), py::arg("ids"),
        py::arg("threads"));
  py::class_<PyModel>(m, "Model",
      "Packed weights of layers [first, last), LM head and perhaps an exit head: read-only, shared by engines.")
      .def(py::init(&make_model), py::arg("shape"), py::arg("tensors"), py::arg("frequencies"), py::arg("format"),
           py::arg("kv"), py::arg("threads"), py::arg("first") = 0, py::arg("last") = -1, py::arg("lm_head") = true,
           py::arg("importance") = py::none())
      .def("with_exit_head", &with_exit_head, py::arg("exit_layer"), py::arg("tensors"), py::arg("draft_ids"),
           py::arg("format"), py::arg("threads"))
      .def_property_readonly("packed_bytes", [](const PyModel& model) { return model.model->packed_bytes; })
      .def_property_readonly("isa", [](const PyModel& model) { return std::string(model.model->kernels->name); });

  py::class_<Crowd, std::shared_ptr<Crowd>>(m, "Crowd",
      "For tests: passes of an engine's teams beside made-up other programs, counted by the members that worked.")
      .def_property_readonly("worked", [](Crowd& crowd) {
        const std::lock_guard<std::mutex> lock(crowd.mutex);
        return crowd.worked;
      });
  py::class_<PyEngine>(m, "Engine",
      "A model with threads and the KV caches of one text; start() begins an answer and ends the one before.")
      .def(py::init([](const PyModel& model, int threads, const std::vector<int>& cuts) {
             return PyEngine{model, {new CpuEngine(model.model, threads, cuts), NotAfterFork()}};
           }),
           py::arg("model"), py::arg("threads"), py::arg("cuts") = std::vector<int>())
      .def_property_readonly("threads", [](const PyEngine& engine) { return engine.engine->threads(); })
      .def_property_readonly("pin_problem", [](const PyEngine& engine) { return engine.engine->pin_problem(); })
      .def("shared_rows", [](const PyEngine& engine, const std::vector<int>& prompt) { return engine.engine->shared_rows(prompt); })
      .def("crowd", [](PyEngine& engine, double seconds, double lost, const std::vector<int>& room) {
             return crowd(engine.engine.get(), seconds, lost, room);
           }, py::arg("seconds"), py::arg("lost"), py::arg("room"))
      .def(
          "time_kernel",
          [](PyEngine& engine, const std::string& name, int rows, int context, int repeats) {
            KernelTime time;
            {
              const py::gil_scoped_release release;
              time = time_kernel(engine.engine.get(), name, rows, context, repeats);
            }
            return py::make_tuple(time.seconds, time.least, time.most, time.bytes, time.flops);
          },
          py::arg("name"), py::arg("rows"), py::arg("context"), py::arg("repeats"))
      .def(
          "calibrate",
          [](PyEngine& engine, double seconds) {
            Costs costs;
            {
              const py::gil_scoped_release release;
              costs = calibrate(engine.engine.get(), seconds);
            }
            return dict_of(costs);
          },
          py::arg("seconds"))
      .def(
          "logits",
          [](PyEngine& engine, const std::vector<int>& ids, int last) {
            if (last < 1 || last > int(ids.size())) throw std::invalid_argument("there are not so many ids");
            std::vector<float> logits;
            {
              const py::gil_scoped_release release;
              logits = engine.engine->logits(ids, last);
            }
            return py::array_t<float>({py::ssize_t(last), py::ssize_t(logits.size() / last)}, logits.data());
          },
          py::arg("ids"), py::arg("last"))
      .def(
          "start",
          [](PyEngine& engine, std::vector<int> prompt, const py::dict& sampling, const py::object& schedule, Limits limits,
             bool report_drafts, bool lock_step, std::pair<int, int> ticks, const py::object& oracle, bool trace) {
            Request request;
            request.prompt = std::move(prompt);
            request.sampling = sampling_of(sampling);
            if (py::isinstance<py::dict>(schedule)) request.schedule = schedule_of(schedule.cast<py::dict>());
            else request.planner = schedule.cast<std::shared_ptr<Planner>>();
            request.limits = std::move(limits);
            request.report_drafts = report_drafts;
            request.lock_step = lock_step;
            request.ticks = {ticks.first, ticks.second};
            if (!oracle.is_none()) {
              const auto [truth, acceptance, seed] = oracle.cast<std::tuple<std::vector<int>, double, uint64_t>>();
              request.oracle = {truth, acceptance, seed};
            }
            PySession session;
            if (trace) session.trace.reset(new Trace);
            session.session.reset(new Session(engine.engine.get(), std::move(request), session.trace.get()), NotAfterFork());
            return session;
          },
          py::keep_alive<0, 1>(), py::arg("prompt"), py::arg("sampling"), py::arg("schedule"), py::arg("limits"),
          py::arg("report_drafts") = false, py::arg("lock_step") = false, py::arg("ticks") = std::make_pair(1, 1),
          py::arg("oracle") = py::none(), py::arg("trace") = false);

  py::class_<CpuBatch, std::unique_ptr<CpuBatch, NotAfterFork>>(m, "Batch",
      "Many texts side by side for sampling training text: one row [texts] of each a step, one KV cache for each.")
      .def(py::init([](const PyModel& model, int threads, int texts, int capacity, const std::vector<int>& keep) {
             return std::unique_ptr<CpuBatch, NotAfterFork>(new CpuBatch(model.model, threads, texts, capacity, keep));
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("threads"), py::arg("texts"), py::arg("capacity"),
           py::arg("keep"))
      .def("step", &batch_step, py::arg("ids"), py::arg("positions"), py::arg("inverse_temperatures"), py::arg("seeds"));

  py::class_<PySession>(m, "Session",
      "An answer in the making: iterates over drafts and rounds as the tuples that ppsd_rt.protocol names.")
      .def("__iter__", [](PySession& session) -> PySession& { return session; })
      .def("__next__", &PySession::next)
      .def("cancel", &PySession::cancel)
      .def("close", &PySession::close)
      .def_readonly("seconds", &PySession::seconds)
      .def("spans", &PySession::spans);

  py::class_<Planner, std::shared_ptr<Planner>>(m, "Planner",
      "Chooses the schedule of `auto`, from what steps and passes cost (seconds) and what drafts were accepted.")
      .def(py::init([](const py::dict& costs, double prior, int lookup, bool siblings) {
             auto* planner = new Planner(costs_of(costs), prior, simulate_overlap, lookup, siblings);
             return std::shared_ptr<Planner>(planner, NotAfterFork());   // an answer's thread may be in it
           }),
           py::arg("costs"), py::arg("prior"), py::arg("lookup") = 0, py::arg("siblings") = false)
      .def_property_readonly("acceptance", &Planner::acceptance)
      .def_property_readonly("credit", &Planner::credit)
      .def("predictions",
           [](const Planner& planner) {
             py::list out;
             for (const Prediction& p : planner.predictions())
               out.append(py::make_tuple(name_of(p.mode), p.length, p.tokens_per_second));
             return out;
           })
      .def("predict", [](const Planner& planner, const std::string& mode, int length, double acceptance) {
             if (mode == "turns") return planner.predict_turns(length, acceptance).tokens_per_second;
             return (mode == "overlap" ? planner.predict_overlap(acceptance) : planner.predict_plain()).tokens_per_second;
           }, py::arg("mode"), py::arg("length"), py::arg("acceptance"))
      .def("schedule", [](const Planner& planner) {
             const Schedule& s = planner.schedule();
             return py::make_tuple(s.first_chunk, s.max_chunk, s.lookahead, s.overlap, s.stop_rule.threshold, s.siblings);
           })
      .def("after", [](Planner& planner, int committed, int judged, int accepted, double seconds, int copied, int siblings,
                       bool rescued, int position, double chance, int dropped) {
             Round round;
             round.position = position;
             round.rows = judged + dropped + 1 + siblings;
             round.dropped = dropped;
             round.siblings = siblings;
             round.rescued = rescued;
             round.copied = copied;   // of the judged, the first ones
             round.committed.assign(size_t(committed), 0);
             round.judged.assign(size_t(judged), Draft{});
             for (int i = 0; i < copied; ++i) round.judged[i].copied = 1, round.judged[i].confidence = chance;
             round.accepted = accepted;
             planner.after(round, seconds);
           }, py::arg("committed"), py::arg("judged"), py::arg("accepted"), py::arg("seconds"),
           py::arg("copied") = 0, py::arg("siblings") = 0, py::arg("rescued") = false, py::arg("position") = Costs::kContext,
           py::arg("chance") = 0.5, py::arg("dropped") = 0)
      .def("begin", &Planner::begin, py::arg("context"))
      .def_property_readonly("copy_threshold", [](const Planner& planner) { return planner.schedule().stop_rule.copy_threshold; })
      .def("measured", [](const Planner& planner) {
        py::dict out;
        for (const auto mode : {Prediction::Mode::kPlain, Prediction::Mode::kTurns, Prediction::Mode::kOverlap}) {
          const Planner::Measured& measured = planner.measured(mode);
          out[name_of(mode)] =
              py::make_tuple(measured.rounds, measured.tokens, measured.seconds, measured.predicted_seconds);
        }
        return out;
      });

  py::class_<Limits>(m, "Limits", "Where the committed text ends: before position `end`, or at one of `stop_ids`.")
      .def(py::init([](int end, std::vector<int> stop_ids) {
             Limits limits;
             limits.end = end;
             limits.stop_ids = std::move(stop_ids);
             return limits;
           }),
           py::arg("end"), py::arg("stop_ids"));

  m.def("lock_step_events", &lock_step_events, py::arg("prompt"), py::arg("draw"), py::arg("truth"), py::arg("schedule"),
        py::arg("limits"), py::arg("seed"), py::arg("stages"), py::arg("per_stage"));
  m.def("simulate", &simulate, py::kw_only(), py::arg("schedule"), py::arg("tokens"), py::arg("acceptance"),
        py::arg("seed"), py::arg("step"), py::arg("drawing_step"), py::arg("verify"), py::arg("links"),
        py::arg("link_row"), py::arg("interference"), py::arg("trace"));
  m.def("lock_step_toy", &lock_step_toy, py::arg("schedule"), py::arg("tokens"), py::arg("acceptance"), py::arg("seed"),
        py::arg("stages"), py::arg("per_stage"));
  m.def("toy_answer", [](uint64_t seed, int tokens) { return ToyModel{seed}.plain(Toy::prompt(), 1 + tokens); });
  bind_cuda(m);
  m.def("calibrate", [](const py::object& bench, int threads, bool overlap, double step_share, double seconds) {
    Costs costs;
    {
      const py::gil_scoped_release release;
      PyBench made_up(bench);
      costs = calibrate(&made_up, threads, overlap, step_share, seconds);
    }
    return dict_of(costs);
  }, py::arg("bench"), py::arg("threads"), py::arg("overlap"), py::arg("step_share"), py::arg("seconds"));
  py::register_exception<NoThread>(m, "NoThread", PyExc_RuntimeError).doc() = "The system starts no more threads.";
  m.def("running_threads", &running_threads);
  m.def("let_threads_start", &let_threads_start, py::arg("count"));
  m.def("roster", &roster, py::arg("size"), py::arg("pinnable"), py::arg("seconds"), py::arg("lost"),
        py::arg("room"));
  m.def("stop_rule_draws", &stop_rule_draws, py::arg("schedule"), py::arg("seed"), py::arg("history"));
  m.def("philox", [](uint64_t seed, std::array<uint32_t, 4> counter) { return philox(PhiloxKey(seed), counter); });
  m.def("uniform", [](uint64_t seed, int position, int id, uint32_t stream) {
    return uniform_from_word(philox(PhiloxKey(seed), {uint32_t(id), uint32_t(position), stream, 0})[0]);
  });
  bind_ranks(m);
  bind_stages(m);
}
