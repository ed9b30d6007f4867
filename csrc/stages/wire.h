// How passes and verdicts look on a network: a header of kWireIds int32 words, in the byte order of the hosts, tables
// (decoding/pass.h), and rows.
//
//   0 magic     1 kind      2-3 epoch   4 limit     5 count     6 more      7 flags     8-9 sent (ns)     10-15 zero
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "../core/protocol.h"
#include "../core/schedule.h"

namespace ppsd {

constexpr int kWireVersion = 12;
constexpr int32_t kWireMagic = 0x50535000 + kWireVersion;
constexpr int kWireIds = 16;                                    // where the tables begin
constexpr int kMostLogprobs = 20;                               // the most probable ids that are reported for a token
constexpr int kWireLogprobs = 2 + 2 * kMostLogprobs;            // words of a token: its own, how many ids, these with theirs

enum class Wire : int32_t { kPass = 1, kChosen = 2 };
// kWireFeedback: the verdict is to carry the rows' hidden states home, for the exit head; or it does. kWireTrace: stages record a
// timeline. kWireLogprob: the verdict tells log-probabilities.
enum WireFlags : int32_t { kWireFeedback = 1, kWireTrace = 2, kWireLogprob = 4 };

struct WireHeader {
  int32_t magic = kWireMagic, kind = 0;
  uint64_t number = 0;  // of the pass
  int32_t limit = 0;    // rows up to which the passes after it may join it
  int32_t count = 0;    // rows, or tokens of a verdict
  int32_t more = 0;     // words of tables
  int32_t flags = 0;
  int64_t sent = 0;     // steady clock of the sender, for an injected delay on one host
  int32_t zero[6] = {};
};
static_assert(sizeof(WireHeader) == kWireIds * 4, "the header's layout");

// Now, as `sent` says it; comparable between processes of one host.
inline int64_t wire_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void sleep_until(int64_t clock) {
  std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(clock)));
}

// Of a verdict's tokens; words: [tokens][kWireLogprobs].
inline void write_logprobs(const std::vector<Logprobs>& logprobs, int32_t* words) {
  const auto put = [](float value, int32_t* word) { std::memcpy(word, &value, sizeof value); };
  for (const Logprobs& each : logprobs) {
    std::fill_n(words, kWireLogprobs, 0);
    put(each.own, words);
    const int count = std::min(int(each.top.size()), kMostLogprobs);
    words[1] = count;
    for (int i = 0; i < count; ++i) {
      words[2 + 2 * i] = each.top[size_t(i)].first;
      put(each.top[size_t(i)].second, words + 3 + 2 * i);
    }
    words += kWireLogprobs;
  }
}

inline std::vector<Logprobs> read_logprobs(const int32_t* words, int tokens) {
  std::vector<Logprobs> logprobs;
  logprobs.resize(size_t(tokens));
  const auto get = [](const int32_t* word) {
    float value;
    std::memcpy(&value, word, sizeof value);
    return value;
  };
  for (Logprobs& each : logprobs) {
    each.own = get(words);
    for (int i = 0; i < std::clamp(words[1], 0, kMostLogprobs); ++i)
      each.top.emplace_back(words[2 + 2 * i], get(words + 3 + 2 * i));
    words += kWireLogprobs;
  }
  return logprobs;
}

}  // namespace ppsd
