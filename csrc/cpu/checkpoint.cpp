#include "checkpoint.h"

#include <algorithm>
#include <stdexcept>

namespace ppsd {
namespace {

bool has(const NamedTensors& tensors, const std::string& name) { return tensors.count(name) > 0; }

// Absent if it may be.
Tensor tensor_of(const NamedTensors& tensors, const std::string& name, int64_t rows, int64_t columns, bool required = true) {
  const auto found = tensors.find(name);
  const bool there = found != tensors.end();
  if (there ? found->second.rows != rows || found->second.columns != columns : required)
    throw std::runtime_error("tensor " + name + " is missing or of another shape than [" + std::to_string(rows) + ", " +
                             std::to_string(columns) + "]");
  return there ? found->second : Tensor{};
}

// layer: whose way of attending it has. inner: the width of its MLP; 0: it has none
// width: what queries, keys and values read; 0: a hidden state
LayerTensors layer_of(const NamedTensors& tensors, const std::string& prefix, const ModelShape& s, int layer, int64_t inner,
                      int64_t width = 0) {
  LayerTensors t;
  t.attention = s.attention_of(layer);
  const auto get = [&](const std::string& name, int64_t rows, int64_t columns, bool required = true) {
    return tensor_of(tensors, prefix + name, rows, columns, required);
  };
  if (width == 0) width = s.hidden_size;
  t.input_norm = get("input_layernorm.weight", s.hidden_size, 1);
  t.q = get("self_attn.q_proj.weight", s.q_outputs(), width);
  t.k = get("self_attn.k_proj.weight", s.kv_outputs(), width);
  t.v = get("self_attn.v_proj.weight", s.kv_outputs(), width);
  t.o = get("self_attn.o_proj.weight", s.hidden_size, s.q_outputs());
  t.q_bias = get("self_attn.q_proj.bias", s.q_outputs(), 1, false);
  t.k_bias = get("self_attn.k_proj.bias", s.kv_outputs(), 1, t.q_bias.present());
  t.v_bias = get("self_attn.v_proj.bias", s.kv_outputs(), 1, t.q_bias.present());
  t.o_bias = get("self_attn.o_proj.bias", s.hidden_size, 1, false);
  t.q_norm = get("self_attn.q_norm.weight", s.head_dim, 1, false);
  t.k_norm = get("self_attn.k_norm.weight", s.head_dim, 1, t.q_norm.present());
  if (t.q_norm.present() && s.head_dim > kMostHeadDim)
    throw std::runtime_error(prefix + ": norms of queries and keys need a head_dim of 256 at most");
  if (inner > 0) {
    t.post_norm = get("post_attention_layernorm.weight", s.hidden_size, 1);
    t.gate = get("mlp.gate_proj.weight", inner, s.hidden_size);
    t.up = get("mlp.up_proj.weight", inner, s.hidden_size);
    t.down = get("mlp.down_proj.weight", s.hidden_size, inner);
    t.gate_bias = get("mlp.gate_proj.bias", inner, 1, false);
    t.up_bias = get("mlp.up_proj.bias", inner, 1, t.gate_bias.present());
    t.down_bias = get("mlp.down_proj.bias", s.hidden_size, 1, t.gate_bias.present());
  }
  return t;
}

std::vector<LayerTensors> layers_of(const NamedTensors& tensors, const ModelShape& shape, int first, int last) {
  std::vector<LayerTensors> layers;
  for (int i = first; i < last; ++i)
    layers.push_back(layer_of(tensors, "model.layers." + std::to_string(i) + ".", shape, i, shape.intermediate_size));
  return layers;
}

void check(const ModelShape& s, Stored kv) {
  if (s.hidden_size % kBlock || s.intermediate_size % kBlock || s.q_outputs() % kBlock || s.head_dim % kPanel)
    throw std::runtime_error("the cpu backend needs hidden and intermediate sizes that are multiples of 32 and a head_dim "
                             "that is a multiple of 16; use --backend torch");
  if (!s.attention.empty() && s.attention.size() != size_t(s.num_layers))
    throw std::runtime_error("the way of attending is to be given for every layer, or for none");
  if (kv == Stored::kInt8 && !KvCache::takes_int8(s.head_dim))
    throw std::runtime_error("an int8 KV cache needs a head_dim that is a multiple of 32 and 256 at most");
}

// Memory that the model owns from now on.
uint8_t* allocate(size_t bytes, const PackedFile& file, Team* team, CpuModel* model) {
  model->mapped = file.present();
  model->memory.push_back(std::make_shared<const Memory>(model->mapped ? file.map(bytes, team) : Memory(bytes)));
  model->packed_bytes += bytes;
  return model->memory.back()->as<>();
}

// Are the rows of a head those that the model has for these ids, but for rounding? Some of them tell.
bool holds_rows_of(const Tensor& head, const std::vector<int>& ids, const Tensor& lm_head) {
  if (!lm_head.present()) return false;
  std::vector<float> own(size_t(head.columns)), model(size_t(head.columns));
  for (size_t i = 0; i < ids.size(); i += ids.size() / 64 + 1) {
    read_row(head, int64_t(i), own.data());
    read_row(lm_head, ids[i], model.data());
    double error = 0.0, square = 0.0;
    for (size_t k = 0; k < own.size(); ++k) {
      error += double(own[k] - model[k]) * double(own[k] - model[k]);
      square += double(model[k]) * double(model[k]);
    }
    if (!(error <= 1e-4 * square)) return false;
  }
  return true;
}

}  // namespace

std::vector<const PackedLayer*> pointers(const std::vector<PackedLayer>& layers, int first, int last) {
  std::vector<const PackedLayer*> out;
  for (int i = first; i < last; ++i) out.push_back(&layers[i]);
  return out;
}

void embed(const Tensor& table, int id, float* row) {
  const int n = int(table.columns);
  read_row(table, id, row);
  float nothing = 0.0f;   // stays so, as long as all of the row is finite: it has not been packed, and so not looked at
  for (int i = 0; i < n; ++i) nothing += 0.0f * row[i];
  if (nothing != 0.0f)
    throw std::runtime_error("the embedding of token " + std::to_string(id) +
                             " is NaN or infinite: the model's file is damaged, fetch it again");
}

DraftVocabulary CpuModel::draft_vocabulary() const {
  if (draft_ids.empty()) return DraftVocabulary(shape.vocab_size);
  return {*kernels, draft_ids, draft_rows, drafting_head().lm_head.format};
}

Format format_of(const std::string& name) {
  if (name == "float32") return Format::kFp32;
  if (name == "bfloat16") return Format::kBf16;
  if (name == "int8") return Format::kInt8;
  if (name == "int4") return Format::kInt4;
  throw std::runtime_error("format " + name + " is unknown; formats are float32, bfloat16, int8, int4");
}

Stored kv_format_of(const std::string& name) {
  if (name == "float32") return Stored::kFp32;
  if (name == "bfloat16") return Stored::kBf16;
  if (name == "int8") return Stored::kInt8;
  throw std::runtime_error("format " + name + " is unknown to the KV cache; formats are float32, bfloat16, int8");
}

std::vector<LayerTensors> layers_of(const NamedTensors& tensors, const ModelShape& shape) {
  return layers_of(tensors, shape, 0, shape.num_layers);
}

Tensor embedding_of(const NamedTensors& tensors, const ModelShape& shape) {
  return tensor_of(tensors, "model.embed_tokens.weight", shape.vocab_size, shape.hidden_size);
}

std::shared_ptr<const CpuModel> pack_model(const Kernels& kernels, const ModelShape& shape, const NamedTensors& tensors,
                                           Rotary rotary, const Packing& packing) {
  check(shape, packing.kv);
  const int first = packing.first, last = packing.last < 0 ? shape.num_layers : packing.last;
  if (first < 0 || first > last || last > shape.num_layers) throw std::runtime_error("there are no such layers");
  auto model = std::make_shared<CpuModel>();
  model->kernels = &kernels;
  model->shape = shape;
  model->format = packing.format;
  model->kv = packing.kv;
  model->rotary = std::move(rotary);
  model->embedding = embedding_of(tensors, shape);
  const bool tied = !has(tensors, "lm_head.weight");
  model->lm_head = tied ? model->embedding : tensor_of(tensors, "lm_head.weight", shape.vocab_size, shape.hidden_size);
  const std::vector<LayerTensors> layers = layers_of(tensors, shape, first, last);
  const Tensor norm = tensor_of(tensors, "model.norm.weight", shape.hidden_size, 1);

  Team team(packing.threads, {});
  const bool as_stored = std::any_of(tensors.begin(), tensors.end(), [](const auto& named) { return named.second.four_bits(); });
  const Packer packer(kernels, packing.format, shape, &team, as_stored, packing.file.present());
  size_t bytes = packing.lm_head ? packer.lm_head_bytes(model->lm_head) : 0;
  for (const LayerTensors& layer : layers) bytes += packer.layer_bytes(layer);
  uint8_t* memory = allocate(bytes, packing.file, &team, model.get());
  const int width = InputOffsets(shape).width;
  model->layers.resize(size_t(shape.num_layers));
  for (int i = first; i < last; ++i) {
    const float* importance = packing.importance ? packing.importance + size_t(i) * width : nullptr;
    model->layers[i] =
        named("layer " + std::to_string(i), [&] { return packer.layer(layers[i - first], &memory, importance); });
  }
  model->head.norm = named("the final norm", [&] { return Packer::vector(norm); });
  if (packing.lm_head) model->head.lm_head = named("the LM head", [&] { return packer.lm_head(model->lm_head, &memory); });
  return model;
}

std::shared_ptr<const CpuModel> with_exit_head(const CpuModel& base, int exit_layer, const NamedTensors& tensors,
                                               std::vector<int> draft_ids, int threads, const PackedFile& file, int tap) {
  auto model = std::make_shared<CpuModel>(base);
  model->exit_layer = exit_layer;
  model->draft_ids = std::move(draft_ids);
  model->draft_rows = model->lm_head;
  const ModelShape& shape = model->shape;
  const auto layer = [](int i) { return "layers." + std::to_string(i) + "."; };
  int count = 0;
  while (has(tensors, layer(count) + "input_layernorm.weight")) ++count;
  std::vector<LayerTensors> layers;   // they begin as the model's last layers, and attend as those do
  for (int i = 0; i < count; ++i) {
    const auto gate = tensors.find(layer(i) + "mlp.gate_proj.weight");
    const int64_t inner = gate == tensors.end() ? 0 : gate->second.rows;   // it may be narrower than the model's
    if (inner % kBlock || inner > shape.intermediate_size)
      throw std::runtime_error("the exit head's MLP has a width of " + std::to_string(inner) + "; the cpu backend takes "
                               "multiples of 32, up to the model's " + std::to_string(shape.intermediate_size));
    layers.push_back(layer_of(tensors, layer(i), shape, std::max(0, shape.num_layers - count + i), inner));
  }
  const auto distance = [](int d) { return "feedback." + std::to_string(d) + ".weight"; };
  std::vector<Tensor> distances;
  for (int d = 1; has(tensors, distance(d)); ++d)
    distances.push_back(tensor_of(tensors, distance(d), shape.hidden_size, shape.hidden_size));
  const Tensor feedback_norm = tensor_of(tensors, "feedback.norm.weight", shape.hidden_size, 1, !distances.empty());
  const Tensor norm = tensor_of(tensors, "norm.weight", shape.hidden_size, 1);
  ModelShape without_queries = shape;
  without_queries.num_heads = 0;
  LayerTensors keys;
  Tensor heard;
  if (tap > 0) {
    if (layers.empty() || distances.empty() || tap <= exit_layer || tap >= shape.num_layers)
      throw std::runtime_error("an exit head cannot hear layer " + std::to_string(tap));
    keys = layers.front();
    keys.q = keys.q_bias = keys.o = keys.o_bias = keys.gate = keys.gate_bias = {};
    keys.q.columns = 2 * shape.hidden_size;
    keys.k = tensor_of(tensors, "tap.k_proj.weight", shape.kv_outputs(), keys.q.columns);
    keys.v = tensor_of(tensors, "tap.v_proj.weight", shape.kv_outputs(), keys.q.columns);
    heard = tensor_of(tensors, "tap.feedback.weight", shape.hidden_size, shape.hidden_size);
  }

  Team team(threads, {});
  const Packer packer(*model->kernels, model->format, shape, &team, false, file.present());
  const Packer keys_packer(*model->kernels, model->format, without_queries, &team, false, file.present());
  size_t bytes = model->draft_ids.empty() ? 0 : packer.matrix_bytes(int(model->draft_ids.size()), shape.hidden_size);
  for (const LayerTensors& own : layers) bytes += packer.layer_bytes(own);
  bytes += (distances.size() + (tap > 0)) * packer.matrix_bytes(shape.hidden_size, shape.hidden_size);
  if (tap > 0) bytes += keys_packer.layer_bytes(keys);
  uint8_t* memory = allocate(bytes, file, &team, model.get());
  model->exit_layers.clear();
  for (const LayerTensors& own : layers) model->exit_layers.push_back(packer.layer(own, &memory));
  model->exit_feedback = {};
  if (!distances.empty()) model->exit_feedback.norm = Packer::vector(feedback_norm);
  for (const Tensor& matrix : distances) model->exit_feedback.distances.push_back(packer.matrix(matrix, &memory));
  model->tap = {tap, {}, {}, {}, {}};
  if (tap > 0) {
    model->tap.norm = Packer::vector(tensor_of(tensors, "tap.norm.weight", shape.hidden_size, 1));
    model->tap.bias = Packer::vector(tensor_of(tensors, "tap.norm.bias", shape.hidden_size, 1));
    model->tap.keys = keys_packer.layer(keys, &memory);
    model->tap.feedback = packer.matrix(heard, &memory);
  }
  model->exit_head.norm = Packer::vector(norm);
  model->exit_head.lm_head = model->draft_ids.empty()
                                 ? model->head.lm_head
                                 : packer.draft_head(model->lm_head, model->draft_ids, &memory);
  return model;
}

std::shared_ptr<const CpuModel> with_eagle3(const CpuModel& base, Eagle eagle, const NamedTensors& tensors,
                                            std::vector<int> draft_ids, int threads, const PackedFile& file) {
  const ModelShape& shape = eagle.shape;
  check(shape, base.kv);
  if (shape.hidden_size != base.shape.hidden_size) throw std::runtime_error("the exit head has another hidden size");
  auto model = std::make_shared<CpuModel>(base);
  model->exit_layer = 0;
  model->draft_ids = std::move(draft_ids);
  const int64_t hidden = shape.hidden_size, taps = int64_t(eagle.taps.size());
  std::vector<LayerTensors> layers;
  for (int i = 0; i < shape.num_layers; ++i)
    layers.push_back(layer_of(tensors, "layers." + std::to_string(i) + ".", shape, i, shape.intermediate_size,
                              i == 0 ? 2 * hidden : hidden));
  const Tensor fc = tensor_of(tensors, "fc.weight", hidden, taps * hidden);
  const int64_t outputs = model->draft_ids.empty() ? shape.vocab_size : int64_t(model->draft_ids.size());
  const Tensor lm_head = tensor_of(tensors, "lm_head.weight", outputs, hidden);
  model->draft_rows = holds_rows_of(lm_head, model->draft_ids, base.lm_head) ? base.lm_head : Tensor{};
  const auto vector = [&](const std::string& name, int64_t rows, bool required) {
    const Tensor tensor = tensor_of(tensors, name, rows, 1, required);
    return tensor.present() ? named("the exit head's " + name, [&] { return Packer::vector(tensor); }) : std::vector<float>();
  };
  eagle.embedding = tensor_of(tensors, "embed_tokens.weight", shape.vocab_size, hidden, false);
  if (!eagle.embedding.present()) eagle.embedding = base.embedding;
  std::vector<float> row(static_cast<size_t>(hidden));
  for (int id = 0; id < shape.vocab_size && eagle.embedding.data != base.embedding.data; ++id) embed(eagle.embedding, id, row.data());
  eagle.input_norm = vector("input_norm.weight", taps * hidden, false);
  eagle.fc_bias = vector("fc.bias", hidden, false);
  for (int64_t tap = 0; has(tensors, "fc_norm.0.weight") && tap < taps; ++tap)
    eagle.fc_norms.push_back(vector("fc_norm." + std::to_string(tap) + ".weight", hidden, true));
  eagle.embedding_norm = vector("layers.0.input_layernorm.weight", hidden, true);
  eagle.feature_norm = vector("layers.0.hidden_norm.weight", hidden, true);
  eagle.head.norm = vector("norm.weight", hidden, true);

  Team team(threads, {});
  const Packer packer(*model->kernels, model->format, shape, &team, false, file.present());
  size_t bytes = packer.matrix_bytes(int(hidden), int(taps * hidden)) + packer.matrix_bytes(int(outputs), int(hidden));
  for (const LayerTensors& own : layers) bytes += packer.layer_bytes(own);
  uint8_t* memory = allocate(bytes, file, &team, model.get());
  eagle.fc = named("the exit head's fc", [&] { return packer.matrix(fc, &memory); });
  for (const LayerTensors& own : layers)
    eagle.layers.push_back(named("the exit head's layers", [&] { return packer.layer(own, &memory); }));
  eagle.head.lm_head = named("the exit head's LM head", [&] { return packer.matrix(lm_head, &memory); });
  model->eagle = std::make_shared<const Eagle>(std::move(eagle));
  return model;
}

}  // namespace ppsd
