#include "cpu_answers.h"

#include <cmath>
#include <memory>
#include <thread>

#include "../cpu/session.h"
#include "check.h"

namespace ppsd::test {
namespace {

constexpr int kContext = 160;

// Random tensors, large enough for the answers to be neither constant nor uniform.
class TinyWeights {
 public:
  TinyWeights(const ModelShape& shape, uint64_t seed) : shape_(shape), random_(seed) {}

  Tensor matrix(int rows, int columns) { return tensor(rows, columns, 0.0f, 0.15f); }
  Tensor vector(int size) { return tensor(size, 1, 1.0f, 0.1f); }
  LayerTensors layer(bool mlp) {
    LayerTensors t;
    t.input_norm = vector(shape_.hidden_size);
    t.q = matrix(shape_.q_outputs(), shape_.hidden_size);
    t.k = matrix(shape_.kv_outputs(), shape_.hidden_size);
    t.v = matrix(shape_.kv_outputs(), shape_.hidden_size);
    t.o = matrix(shape_.hidden_size, shape_.q_outputs());
    if (!mlp) return t;
    t.post_norm = vector(shape_.hidden_size);
    t.gate = matrix(shape_.intermediate_size, shape_.hidden_size);
    t.up = matrix(shape_.intermediate_size, shape_.hidden_size);
    t.down = matrix(shape_.hidden_size, shape_.intermediate_size);
    return t;
  }

 private:
  Tensor tensor(int rows, int columns, float mean, float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    data_.push_back(std::make_unique<std::vector<float>>(size_t(rows) * columns));
    for (float& x : *data_.back()) x = normal(random_);
    return {data_.back()->data(), Stored::kFp32, rows, columns, false};
  }

  const ModelShape shape_;
  Random random_;
  std::vector<std::unique_ptr<std::vector<float>>> data_;
};

// What bindings.cpp makes of a checkpoint, and of an exit head with a layer of its own and half of the vocabulary.
std::shared_ptr<CpuModel> tiny_model(const Kernels& kernels, Format format, TinyWeights* weights, const ModelShape& shape) {
  auto model = std::make_shared<CpuModel>();
  model->kernels = &kernels;
  model->shape = shape;
  model->format = format;
  model->kv = format == Format::kFp32 ? Stored::kFp32 : format == Format::kBf16 ? Stored::kBf16 : Stored::kInt8;
  for (int i = 0; i < shape.head_dim / 2; ++i)
    model->frequencies.push_back(std::pow(10000.0f, -2.0f * float(i) / float(shape.head_dim)));
  model->embedding = weights->matrix(shape.vocab_size, shape.hidden_size);
  std::vector<LayerTensors> layers, exit_layers = {weights->layer(true), weights->layer(false)};
  for (int i = 0; i < shape.num_layers; ++i) layers.push_back(weights->layer(true));
  for (int id = 0; id < shape.vocab_size; id += 2) model->draft_ids.push_back(id);
  Team team(2, {});
  const Packer packer(kernels, format, shape, &team);
  size_t bytes = 2 * packer.lm_head_bytes();
  for (const auto* stack : {&layers, &exit_layers})
    for (const LayerTensors& layer : *stack) bytes += packer.layer_bytes(layer);
  model->memory.emplace_back(bytes);
  uint8_t* memory = model->memory.back().as<>();
  for (const LayerTensors& layer : layers) model->layers.push_back(packer.layer(layer, &memory));
  for (const LayerTensors& layer : exit_layers) model->exit_layers.push_back(packer.layer(layer, &memory));
  model->exit_layer = 2;
  model->exit_format = format;
  model->head.norm = model->exit_head.norm = Packer::vector(weights->vector(shape.hidden_size));
  model->head.lm_head = packer.lm_head(model->embedding, &memory);
  model->exit_head.lm_head = packer.draft_head(model->embedding, model->draft_ids, &memory);
  return model;
}

std::vector<int> answer(CpuEngine* engine, const Request& request, const std::vector<int>* plain, int patience_us,
                        const std::string& where) {
  Session session(engine, request, nullptr);
  const Helper interrupter([&] {
    if (patience_us < 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(patience_us));
    session.cancel();
  });
  std::vector<int> known = request.prompt;
  Event event;
  double seconds = 0.0;
  for (;;) {
    const Session::Status status = session.next(1000, &event, &seconds);
    if (status == Session::Status::kEnded) break;
    if (status == Session::Status::kWaiting) continue;
    const Round* round = std::get_if<Round>(&event);
    if (round != nullptr && plain != nullptr) check_round(*round, *plain, &known, where);
    if (round != nullptr && plain == nullptr) known.insert(known.end(), round->committed.begin(), round->committed.end());
  }
  if (plain != nullptr && patience_us < 0) check(known == *plain, "the answer is shorter than plain decoding's", where);
  return known;
}

Sampling random_sampling(Random& random) {
  Sampling sampling;
  sampling.seed = random();
  if (chance(random, 40)) return sampling;
  sampling.temperature = 0.5f + 0.1f * float(between(random, 0, 8));
  if (chance(random, 50)) sampling.top_k = between(random, 1, 40);
  if (chance(random, 50)) sampling.top_p = 0.9f;
  if (chance(random, 30)) sampling.min_p = 0.02f;
  if (chance(random, 40)) sampling.repetition_penalty = 1.2f;
  return sampling;
}

}  // namespace

int64_t cpu_answers(std::chrono::steady_clock::time_point end, uint64_t seed) {
  ModelShape shape;
  shape.vocab_size = 259, shape.hidden_size = 64, shape.intermediate_size = 96, shape.num_layers = 5;
  shape.num_heads = 4, shape.num_kv_heads = 2, shape.head_dim = 32, shape.rms_norm_eps = 1e-5f;
  Random random(seed);
  int64_t answers = 0;
  do {
    for (const Kernels* kernels : usable_kernels())
      for (Format format : {Format::kInt4, Format::kInt8, Format::kBf16, Format::kFp32}) {
        const std::string where = std::string("CPU library, ") + kernels->name + ", format " +
                                  std::to_string(int(format)) + ", answer " + std::to_string(answers);
        TinyWeights weights(shape, random());
        const auto model = tiny_model(*kernels, format, &weights, shape);
        const std::vector<std::vector<int>> cuts = {{}, {4}, {3, 4}};
        CpuEngine engine(model, between(random, 1, 3), cuts[random() % cuts.size()]);
        Request request;
        request.sampling = random_sampling(random);
        for (int i = between(random, 1, 90); i > 0; --i) request.prompt.push_back(between(random, 0, shape.vocab_size - 1));
        request.limits.end = std::min(int(request.prompt.size()) + between(random, 1, 60), kContext);
        const std::vector<int> plain = answer(&engine, request, nullptr, -1, where);
        for (int turn = 0; turn < 3; ++turn, ++answers) {
          request.schedule = random_schedule(random);
          if (request.sampling.repetition_penalty != 1.0f) request.schedule.siblings = 0.0;
          request.lock_step = chance(random, 20);
          request.report_drafts = chance(random, 50);
          answer(&engine, request, &plain, chance(random, 30) ? between(random, 0, 3000) : -1, where);
        }
        const std::vector<float> logits = engine.logits(request.prompt, 1);
        check(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }), "a logit is not finite", where);
      }
  } while (std::chrono::steady_clock::now() < end);
  return answers;
}

}  // namespace ppsd::test
