#include "ranks.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace ppsd {
namespace {

// The first words of an answer's settings; then come the biases, an id and a float each, and the stop ids.
struct WireSettings {
  int32_t end;
  float temperature, top_p, min_p, repetition_penalty;
  int32_t top_k;
  uint32_t seed[2];
  int32_t prompt;
  float presence_penalty, frequency_penalty;
  int32_t logprobs, min_tokens, biases, stops, grammar;
};
static_assert(sizeof(WireSettings) == kWireSettings * 4, "the layout of settings");

}  // namespace

std::vector<int32_t> words_of(const Settings& settings) {
  const Sampling& s = settings.sampling;
  const size_t stops = s.min_tokens > 0 ? s.stop_ids.size() : 0;
  const WireSettings wire{settings.end, s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.top_k,
                          {uint32_t(s.seed), uint32_t(s.seed >> 32)}, settings.prompt, s.presence_penalty, s.frequency_penalty,
                          s.logprobs, s.min_tokens, int32_t(s.logit_bias.size()), int32_t(stops), settings.grammar};
  std::vector<int32_t> words(kWireSettings);
  std::memcpy(words.data(), &wire, sizeof wire);
  for (const auto& [id, bias] : s.logit_bias) {
    words.push_back(id);
    words.emplace_back();
    std::memcpy(&words.back(), &bias, sizeof bias);
  }
  words.insert(words.end(), s.stop_ids.begin(), s.stop_ids.begin() + ptrdiff_t(stops));
  return words;
}

Settings settings_of(const std::vector<int32_t>& words) {
  WireSettings wire;
  std::memcpy(&wire, words.data(), sizeof wire);
  const bool fits = wire.biases >= 0 && wire.stops >= 0 &&
                    int64_t(words.size()) == kWireSettings + 2 * int64_t(wire.biases) + wire.stops;
  if (!fits || wire.prompt < 0 || wire.min_tokens < 0 || wire.logprobs < -1 || wire.logprobs > kMostLogprobs)
    throw std::runtime_error("an answer's settings are malformed");
  Settings settings{wire.end, wire.prompt, wire.grammar, {}};
  Sampling& s = settings.sampling;
  s.temperature = wire.temperature, s.top_p = wire.top_p, s.min_p = wire.min_p, s.top_k = wire.top_k;
  s.repetition_penalty = wire.repetition_penalty;
  s.presence_penalty = wire.presence_penalty, s.frequency_penalty = wire.frequency_penalty;
  s.seed = wire.seed[0] | uint64_t(wire.seed[1]) << 32;
  s.logprobs = wire.logprobs, s.min_tokens = wire.min_tokens, s.answer = wire.prompt;
  const int32_t* next = words.data() + kWireSettings;
  for (int i = 0; i < wire.biases; ++i, next += 2) {
    float bias;
    std::memcpy(&bias, next + 1, sizeof bias);
    s.logit_bias.emplace_back(next[0], bias);
  }
  s.stop_ids.assign(next, next + wire.stops);
  return settings;
}

CpuStation::CpuStation(std::shared_ptr<const CpuModel> model, int first, int last, std::vector<int> cores, int threads,
                       double delay, size_t kv_bytes, const std::vector<int>& taps)
    : model_(std::move(model)),
      team_(threads, std::move(cores)),
      passes_(*model_, first, last, &team_, kv_bytes, nullptr, 0, taps),
      inbox_(
          [this](PassMessage* pass, const Cancelled& cancelled, PassVerdict* verdict) {
            return passes_.run(pass, cancelled, [this](int rows) { return reserve(rows); }, verdict);
          },
          model_->shape.hidden_size, passes_.last(), delay, passes_.taps().before()) {}

const float* CpuStation::reserve(int rows) {
  if (rows > capacity_) rope_ = make_rope(model_->rotary, capacity_ = rows);
  return rope_.data();
}

}  // namespace ppsd
