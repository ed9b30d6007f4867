// How chunks and verdicts look on a network: int32 words of a fixed layout, in the byte order of the hosts.
//
//   0 magic     1 kind      2-3 epoch   4 start     5 count     6 limit     7 flags     8-9 sent (ns)
//   10 siblings 11 adopted  12 more     13-15 zero
//   16-31       token ids of the rows (of a verdict: the model's own tokens); of kBegin: settings of the answer
//   32-         hidden states of the rows, float32 [count][hidden] (of a verdict: after the last layer, where asked for);
//               of kBegin: more settings
//   and then    of a verdict, where asked for: log-probabilities of its tokens, [count][kWireLogprobs]
//
// Siblings are rows after those of the text, in the same order: a bit of word 10 for each of these that has one.
// Epochs on the wire rise from answer to answer too, so that what an earlier answer has left on the way is void.
#pragma once

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "protocol.h"
#include "schedule.h"

namespace ppsd {

constexpr int kWireVersion = 9;
constexpr int32_t kWireMagic = 0x50535000 + kWireVersion;
constexpr int kWireIds = 16, kWireRows = 32;                    // where these begin
constexpr int kWireSettings = kWireRows - kWireIds;
constexpr int kMostLogprobs = 20;                               // the most probable ids that are reported for a token
constexpr int kWireLogprobs = 2 + 2 * kMostLogprobs;            // words of a token: its own, how many ids, these with theirs
static_assert(kWireRows - kWireIds >= kMaxRows, "a pass fits into a message");

enum class Wire : int32_t { kBegin = 1, kRows = 2, kVerdict = 3, kPass = 4, kChosen = 5 };   // the last two: serving/pass.h
// kWireWhole: not to be merged. kWireFeedback, of kBegin: verdicts are to carry the rows' hidden states home, for the exit
// head; of kVerdict: it does. kWireTrace, of kBegin: every stage records a timeline. kWireLogprob, of kBegin: verdicts are to
// tell log-probabilities; of kVerdict: it does.
enum WireFlags : int32_t { kWirePrompt = 1, kWirePromptEnd = 2, kWireWhole = 4, kWireFeedback = 8, kWireTrace = 16,
                          kWireLogprob = 32 };

struct WireHeader {
  int32_t magic = kWireMagic, kind = 0;
  uint64_t epoch = 0;
  int32_t start = 0;    // the first row; of kBegin: rows that every stage keeps
  int32_t count = 0;    // rows, siblings included
  int32_t limit = 0;    // the most rows of the pass that begins with this message
  int32_t flags = 0;
  int64_t sent = 0;     // steady clock of the sender, for an injected delay on one host
  uint32_t siblings = 0;   // bit r: row start + r has one
  int32_t adopted = 0;  // the sibling that was the text's row before start: its id, and 1; 0: there is none
  int32_t more = 0;     // of kBegin: words of settings after the first kWireSettings
  int32_t zero[3] = {};

  int text_rows() const { return count - int(std::bitset<32>(siblings).count()); }
};
static_assert(sizeof(WireHeader) == kWireIds * 4, "the header's layout");

inline size_t wire_words(int rows, int hidden) { return size_t(kWireRows) + size_t(rows) * size_t(hidden); }
// Room for any message.
inline size_t most_words(int hidden) { return wire_words(kMaxRows, hidden) + size_t(kMaxRows) * kWireLogprobs; }

// A message that came in, checked as far as it can be by itself; `words`: as many as the buffer has.
inline WireHeader read_header(const int32_t* message, size_t words, int hidden) {
  WireHeader header;
  if (words < kWireRows) throw std::runtime_error("a message is too short");
  std::memcpy(static_cast<void*>(&header), message, sizeof header);
  if (header.magic != kWireMagic)
    throw std::runtime_error("a message is not of wire version " + std::to_string(kWireVersion));
  const bool rows = header.kind == int32_t(Wire::kRows), verdict = header.kind == int32_t(Wire::kVerdict);
  const bool counted = rows || verdict ? header.count >= 1 && header.count <= kMaxRows : header.count == 0;
  const bool known = rows || verdict || header.kind == int32_t(Wire::kBegin);
  const bool carries = rows || (verdict && (header.flags & kWireFeedback));
  const size_t wanted = wire_words(carries ? std::clamp(header.count, 0, kMaxRows) : 0, hidden) +
                        (verdict && (header.flags & kWireLogprob) ? size_t(std::clamp(header.count, 0, kMaxRows)) * kWireLogprobs : 0) +
                        size_t(std::max(header.more, 0));
  const bool adds = header.more == 0 || (header.kind == int32_t(Wire::kBegin) && header.more > 0);
  const bool drafts = (rows || verdict) && !(header.flags & kWirePrompt);
  const bool beside = header.siblings == 0 || (drafts && header.siblings >> std::max(header.text_rows(), 0) == 0);
  const bool adopts = header.adopted == 0 || (rows && drafts && header.adopted > 0 && header.start > 0);
  if (!known || !counted || !beside || !adopts || !adds || header.start < 0 || words < wanted)
    throw std::runtime_error("a message is malformed");
  return header;
}

// Of a message that starts with row `start`: which rows have siblings, and the other way round.
inline uint32_t bits_of(const std::vector<Sibling>& siblings, int start) {
  uint32_t bits = 0;
  for (const Sibling& sibling : siblings) bits |= 1u << (sibling.position - start);
  return bits;
}

// ids: of the message's rows; null: not known here.
inline std::vector<Sibling> siblings_of(const WireHeader& header, const int32_t* ids = nullptr) {
  std::vector<Sibling> siblings;
  for (int row = 0, next = header.text_rows(); row < header.text_rows(); ++row)
    if (header.siblings >> row & 1) siblings.push_back({header.start + row, ids != nullptr ? ids[next++] : -1});
  return siblings;
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

inline void write_header(const WireHeader& header, int32_t* message) { std::memcpy(message, &header, sizeof header); }

}  // namespace ppsd
