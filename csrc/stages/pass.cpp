#include "pass.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace ppsd {
namespace {

using Pairs = std::vector<std::pair<int32_t, int32_t>>;

constexpr int kMostFailures = kPassRows;

[[noreturn]] void malformed() { throw std::runtime_error("a pass is malformed"); }

// One word after the other.
class Writer {
 public:
  explicit Writer(int32_t* out) : at_(out), end_(out + kPassTables) {}
  void put(int32_t word) {
    if (at_ == end_) throw std::logic_error("a pass has more tables than a message has room for");
    *at_++ = word;
  }
  void put(const std::vector<int32_t>& words) {
    put(int32_t(words.size()));
    for (int32_t word : words) put(word);
  }
  void put(const Pairs& pairs) {
    put(int32_t(pairs.size()));
    for (const auto& [first, second] : pairs) put(first), put(second);
  }
  int32_t* at() const { return at_; }

 private:
  int32_t *at_, *const end_;
};

class Reader {
 public:
  Reader(const int32_t* begin, size_t words) : at_(begin), end_(begin + words) {}
  int32_t get() {
    if (at_ == end_) malformed();
    return *at_++;
  }
  int32_t at_least(int32_t least) {
    const int32_t word = get();
    return word >= least ? word : (malformed(), 0);
  }
  int32_t count() {
    const int32_t words = at_least(0);
    return words <= end_ - at_ ? words : (malformed(), 0);
  }
  std::vector<int32_t> many() {
    const int32_t words = count();
    std::vector<int32_t> all(at_, at_ + words);
    at_ += words;
    return all;
  }
  Pairs pairs() {   // of numbers from 0
    Pairs all;
    for (int32_t left = count(); left > 0; --left) {
      const int32_t first = at_least(0);
      all.emplace_back(first, at_least(0));
    }
    return all;
  }
  bool ended() const { return at_ == end_; }

 private:
  const int32_t *at_, *const end_;
};

size_t close_message(Wire kind, uint64_t number, int count, int limit, int32_t flags, const Writer& tables, int32_t* out) {
  WireHeader header;
  header.kind = int32_t(kind);
  header.number = number;
  header.count = count;
  header.limit = limit;
  header.flags = flags;
  header.more = int32_t(tables.at() - (out + kWireIds));
  header.sent = wire_clock();
  std::memcpy(out, &header, sizeof header);
  return size_t(tables.at() - out);
}

WireHeader open_message(Wire kind, const int32_t* message, size_t words) {
  WireHeader header;
  if (words < kWireIds) malformed();
  std::memcpy(static_cast<void*>(&header), message, sizeof header);
  if (header.magic != kWireMagic) throw std::runtime_error("a message is not of wire version " + std::to_string(kWireVersion));
  const bool fits = header.kind == int32_t(kind) && header.count >= 0 && header.count <= kPassRows && header.more >= 0 &&
                    size_t(header.more) <= std::min(kPassTables, words - kWireIds);
  return fits ? header : (malformed(), header);
}

std::vector<float> read_floats(const int32_t* from, const int32_t* end, size_t count) {
  if (size_t(end - from) < count) malformed();
  std::vector<float> floats(count);
  if (count > 0) std::memcpy(floats.data(), from, count * sizeof(float));
  return floats;
}

size_t write_floats(const std::vector<float>& floats, int32_t* to) {
  if (!floats.empty()) std::memcpy(to, floats.data(), floats.size() * sizeof(float));
  return floats.size();
}

// Of rows [rows][width], those that stay.
void keep_rows(const std::vector<bool>& stays, std::vector<float>* rows) {
  const auto width = ptrdiff_t(rows->size() / std::max(stays.size(), size_t(1)));
  auto from = rows->begin(), to = from;
  for (const bool stay : stays) {
    const auto end = from + width;
    if (stay) to = from == to ? end : std::move(from, end, to);
    from = end;
  }
  rows->erase(to, rows->end());
}

}  // namespace

int PassMessage::rows() const {
  return std::accumulate(parts.begin(), parts.end(), 0, [](int sum, const PassPart& part) { return sum + part.rows; });
}

void PassMessage::drop(const std::function<bool(const PassPart&)>& is_void) {
  std::vector<bool> stays;   // of every row
  for (PassPart& part : parts) {
    const bool dropped = is_void(part);
    stays.insert(stays.end(), size_t(part.rows), !dropped);
    if (dropped) part = {part.answer, part.epoch, 0, 0, 0, 0, {}, {}};
  }
  keep_rows(stays, &hidden);
  keep_rows(stays, &tapped);
}

void PassMessage::join(const PassMessage& next) {
  PassPart& part = parts.front();
  const PassPart& more = next.parts.front();
  hidden.insert(hidden.end(), next.hidden.begin(), next.hidden.end());
  tapped.insert(tapped.end(), next.tapped.begin(), next.tapped.end());
  number = next.number;
  part.rows += more.rows;
  part.chooses += more.chooses;
  part.ids.insert(part.ids.end(), more.ids.begin(), more.ids.end());
  part.blocks = more.blocks;
}

size_t write_pass(const PassMessage& pass, int32_t* out) {
  Writer tables(out + kWireIds);
  tables.put(pass.wiped);
  tables.put(pass.copies);
  tables.put(pass.closed);
  tables.put(int32_t(pass.opened.size()));
  for (const PassMessage::Opened& opened : pass.opened) tables.put(opened.answer), tables.put(opened.settings);
  tables.put(int32_t(pass.parts.size()));
  for (const PassPart& part : pass.parts) {
    for (int32_t word : {part.answer, part.epoch, part.start, part.rows, part.chooses, part.known}) tables.put(word);
    tables.put(part.ids);
    tables.put(part.blocks);
  }
  const int32_t flags = (pass.wants_hidden ? kWireFeedback : 0) | (pass.traced ? kWireTrace : 0);
  size_t words = close_message(Wire::kPass, pass.number, pass.rows(), pass.limit, flags, tables, out);
  words += write_floats(pass.hidden, out + words);
  return words + write_floats(pass.tapped, out + words);
}

PassMessage read_pass(const int32_t* message, size_t words, int hidden, int taps) {
  const WireHeader header = open_message(Wire::kPass, message, words);
  Reader tables(message + kWireIds, size_t(header.more));
  PassMessage pass;
  pass.number = header.number;
  pass.wants_hidden = (header.flags & kWireFeedback) != 0;
  pass.traced = (header.flags & kWireTrace) != 0;
  pass.limit = std::clamp(header.limit, 0, kMaxRows);
  pass.sent = header.sent;
  pass.wiped = tables.many();
  pass.copies = tables.pairs();
  pass.closed = tables.many();
  for (int32_t left = tables.count(); left > 0; --left) {
    const int32_t answer = tables.get();
    pass.opened.push_back({answer, tables.many(), nullptr});
  }
  for (int32_t left = tables.count(); left > 0; --left) {
    PassPart part;
    part.answer = tables.get();
    part.epoch = tables.at_least(0);
    part.start = tables.at_least(0);
    part.rows = tables.at_least(0);
    part.chooses = tables.at_least(0);
    part.known = tables.at_least(0);
    part.ids = tables.many();
    part.blocks = tables.many();
    const int64_t end = int64_t(part.start) + part.rows;
    if (part.rows > kPassRows || part.chooses > part.rows || part.known > part.start ||
        int64_t(part.ids.size()) != end - part.known || int64_t(part.blocks.size()) * kSpan < end)
      malformed();
    pass.parts.push_back(std::move(part));
  }
  if (!tables.ended() || pass.rows() != header.count || pass.parts.empty()) malformed();
  const int32_t *at = message + kWireIds + header.more, *end = message + words;
  pass.hidden = read_floats(at, end, size_t(header.count) * size_t(hidden));
  pass.tapped = read_floats(at + pass.hidden.size(), end, pass.hidden.size() * size_t(taps));
  return pass;
}

size_t write_verdict(const PassVerdict& verdict, int32_t* out) {
  Writer tables(out + kWireIds);
  tables.put(verdict.dropped);
  tables.put(verdict.chosen);
  tables.put(int32_t(verdict.failures.size()));
  for (const PassVerdict::Failure& failure : verdict.failures) {
    tables.put(failure.part);
    tables.put(int32_t(failure.grammar));
    std::vector<int32_t> why(failure.why.begin(), failure.why.end());
    why.resize(std::min(why.size(), size_t(512)));
    tables.put(why);
  }
  tables.put(int32_t(verdict.tapped.size()));
  const int32_t flags = (verdict.logprobs.empty() ? 0 : kWireLogprob) | (verdict.hidden.empty() ? 0 : kWireFeedback);
  size_t words = close_message(Wire::kChosen, verdict.number, int(verdict.chosen.size()), 0, flags, tables, out);
  if (!verdict.logprobs.empty()) {
    write_logprobs(verdict.logprobs, out + words);
    words += verdict.logprobs.size() * kWireLogprobs;
  }
  words += write_floats(verdict.hidden, out + words);
  return words + write_floats(verdict.tapped, out + words);
}

PassVerdict read_verdict(const int32_t* message, size_t words, int hidden, int taps) {
  const WireHeader header = open_message(Wire::kChosen, message, words);
  Reader tables(message + kWireIds, size_t(header.more));
  PassVerdict verdict;
  verdict.number = header.number;
  verdict.dropped = tables.many();
  verdict.chosen = tables.many();
  for (int32_t left = tables.count(); left > 0; --left) {
    PassVerdict::Failure failure;
    failure.part = tables.at_least(0);
    failure.grammar = tables.get() != 0;
    for (int32_t letter : tables.many()) failure.why.push_back(char(letter));
    if (verdict.failures.size() == kMostFailures) malformed();
    verdict.failures.push_back(std::move(failure));
  }
  const auto tapped = size_t(tables.at_least(0));
  if (!tables.ended() || int(verdict.chosen.size()) != header.count || tapped > size_t(kPassRows) * size_t(taps) * size_t(hidden))
    malformed();
  const size_t count = verdict.chosen.size();
  const int32_t *at = message + kWireIds + header.more, *end = message + words;
  if (header.flags & kWireLogprob) {
    if (size_t(end - at) < count * kWireLogprobs) malformed();
    verdict.logprobs = read_logprobs(at, int(count));
    at += count * kWireLogprobs;
  }
  if (header.flags & kWireFeedback) verdict.hidden = read_floats(at, end, count * size_t(hidden));
  verdict.tapped = read_floats(at + verdict.hidden.size(), end, tapped);
  return verdict;
}

}  // namespace ppsd
