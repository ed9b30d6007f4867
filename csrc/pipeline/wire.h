// How chunks and verdicts look on a network: int32 words of a fixed layout, in the byte order of the hosts.
//
//   0 magic     1 kind      2-3 epoch   4 start     5 count     6 limit     7 flags     8-9 sent (ns)
//   10 siblings 11 adopted  12-15 zero
//   16-31       token ids of the rows (of a verdict: the model's own tokens); of kBegin: settings of the answer
//   32-         hidden states of the rows, float32 [count][hidden] (of a verdict: after the last layer, where asked for)
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

#include "protocol.h"
#include "schedule.h"

namespace ppsd {

constexpr int kWireVersion = 5;
constexpr int32_t kWireMagic = 0x50535000 + kWireVersion;
constexpr int kWireIds = 16, kWireRows = 32;                    // where these begin
constexpr int kWireSettings = kWireRows - kWireIds;
static_assert(kWireRows - kWireIds >= kMaxRows, "a pass fits into a message");

enum class Wire : int32_t { kBegin = 1, kRows = 2, kVerdict = 3 };
// kWireWhole: not to be merged. kWireFeedback, of kBegin: verdicts are to carry the rows' hidden states home, for the exit
// head; of kVerdict: it does. kWireTrace, of kBegin: every stage records a timeline.
enum WireFlags : int32_t { kWirePrompt = 1, kWirePromptEnd = 2, kWireWhole = 4, kWireFeedback = 8, kWireTrace = 16 };

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
  int32_t zero[4] = {};

  int text_rows() const { return count - int(std::bitset<32>(siblings).count()); }
};
static_assert(sizeof(WireHeader) == kWireIds * 4, "the header's layout");

inline size_t wire_words(int rows, int hidden) { return size_t(kWireRows) + size_t(rows) * size_t(hidden); }

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
  const bool drafts = (rows || verdict) && !(header.flags & kWirePrompt);
  const bool beside = header.siblings == 0 || (drafts && header.siblings >> std::max(header.text_rows(), 0) == 0);
  const bool adopts = header.adopted == 0 || (rows && drafts && header.adopted > 0 && header.start > 0);
  if (!known || !counted || !beside || !adopts || header.start < 0 || (carries && words < wire_words(header.count, hidden)))
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

inline void write_header(const WireHeader& header, int32_t* message) { std::memcpy(message, &header, sizeof header); }

}  // namespace ppsd
