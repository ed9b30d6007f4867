#include "ranks.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace ppsd {
namespace {

constexpr int kPromptWord = 8;   // of the settings

}  // namespace

// Words: 0 end, 1-4 floats, 5 top_k, 6-7 seed, 8 prompt, 9-10 floats, 11 logprobs, 12 min_tokens, 13 biases, 14 stop ids,
// 15 grammar; and then the biases, an id and a float each, and the stop ids.
std::vector<int32_t> words_of(const Settings& settings) {
  const Sampling& s = settings.sampling;
  const float floats[] = {s.temperature, s.top_p, s.min_p, s.repetition_penalty};
  const float penalties[] = {s.presence_penalty, s.frequency_penalty};
  std::vector<int32_t> words(kWireSettings);
  words[0] = settings.end;
  std::memcpy(&words[1], floats, sizeof floats);
  words[5] = s.top_k;
  std::memcpy(&words[6], &s.seed, sizeof s.seed);
  words[kPromptWord] = settings.prompt;
  std::memcpy(&words[9], penalties, sizeof penalties);
  words[11] = s.logprobs;
  words[12] = s.min_tokens;
  words[13] = int32_t(s.logit_bias.size());
  const size_t stops = s.min_tokens > 0 ? s.stop_ids.size() : 0;
  words[14] = int32_t(stops);
  words[15] = settings.grammar;
  for (const auto& [id, bias] : s.logit_bias) {
    words.push_back(id);
    words.emplace_back();
    std::memcpy(&words.back(), &bias, sizeof bias);
  }
  words.insert(words.end(), s.stop_ids.begin(), s.stop_ids.begin() + ptrdiff_t(stops));
  return words;
}

Settings settings_of(const std::vector<int32_t>& words) {
  float floats[4], penalties[2];
  std::memcpy(floats, words.data() + 1, sizeof floats);
  std::memcpy(penalties, words.data() + 9, sizeof penalties);
  Settings settings;
  settings.end = words[0];
  settings.prompt = words[kPromptWord];
  settings.grammar = words[15];
  Sampling& s = settings.sampling;
  s.temperature = floats[0], s.top_p = floats[1], s.min_p = floats[2], s.repetition_penalty = floats[3];
  s.top_k = words[5];
  std::memcpy(&s.seed, words.data() + 6, sizeof s.seed);
  s.presence_penalty = penalties[0], s.frequency_penalty = penalties[1];
  s.logprobs = words[11];
  s.min_tokens = words[12];
  s.answer = settings.prompt;
  const int64_t biases = words[13], stops = words[14];
  const bool fits = biases >= 0 && stops >= 0 && int64_t(words.size()) == kWireSettings + 2 * biases + stops;
  if (!fits || settings.prompt < 0 || s.min_tokens < 0 || s.logprobs < -1 || s.logprobs > kMostLogprobs)
    throw std::runtime_error("an answer's settings are malformed");
  const int32_t* next = words.data() + kWireSettings;
  for (int64_t i = 0; i < biases; ++i, next += 2) {
    float bias;
    std::memcpy(&bias, next + 1, sizeof bias);
    s.logit_bias.emplace_back(next[0], bias);
  }
  s.stop_ids.assign(next, next + stops);
  return settings;
}

CpuStation::CpuStation(std::shared_ptr<const CpuModel> model, int first, int last, std::vector<int> cores, int threads,
                       double delay, size_t kv_bytes, const std::vector<int>& taps)
    : model_(std::move(model)),
      team_(threads, std::move(cores)),
      passes_(*model_, first, last, &team_, kv_bytes, nullptr, 0, taps),
      station_(
          [this](Pass* pass, const Cancelled& cancelled, PassVerdict* verdict) {
            return passes_.run(pass, cancelled, [this](int rows) { return reserve(rows); }, verdict);
          },
          model_->shape.hidden_size, passes_.last(), delay, passes_.taps().before()) {}

const float* CpuStation::reserve(int rows) {
  if (rows > capacity_) rope_ = make_rope(model_->rotary, capacity_ = rows);
  return rope_.data();
}

}  // namespace ppsd
