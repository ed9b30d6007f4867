#include "pass.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace ppsd {
namespace {

//   0 magic     1 kind      2-3 number  4 limit     5 count     6 more      7 flags     8-9 sent (ns)     10-15 zero
struct WireHeader {
  int32_t magic = 0x50535000 + kWireVersion, kind = 0;
  uint64_t number = 0;  // of the pass
  int32_t limit = 0;    // rows up to which the passes after it may join it
  int32_t count = 0;    // rows, or tokens of a verdict
  int32_t more = 0;     // words of tables
  int32_t flags = 0;
  int64_t sent = 0;     // steady clock of the sender, for an injected delay on one host
  int32_t zero[6] = {};
};
static_assert(sizeof(WireHeader) == kWireIds * 4, "the header's layout");

enum class Wire : int32_t { kPass = 1, kChosen = 2 };
// kWireFeedback: the verdict is to carry the rows' hidden states home, for the exit head; or it does. kWireTrace: stages record a
// timeline.
enum WireFlags : int32_t { kWireFeedback = 1, kWireTrace = 2 };

[[noreturn]] void malformed() { throw std::runtime_error("a pass is malformed"); }

// -- tables: one word after the other. A Writer and a Reader have the same functions, so that what they are of is said once. --

class Writer {
 public:
  explicit Writer(int32_t* out) : at_(out), end_(out + kPassTables) {}
  template <class Value>
  void value(const Value& value) {   // of four or eight bytes
    const size_t words = sizeof value / 4;
    if (size_t(end_ - at_) < words) throw std::logic_error("a pass has more tables than a message has room for");
    std::memcpy(at_, &value, sizeof value);
    at_ += words;
  }
  void number(int32_t number) { value(number); }   // from 0 on
  template <class List, class Write>
  void each(const List& list, const Write& write) {
    number(int32_t(list.size()));
    for (const auto& one : list) write(one);
  }
  void all(const std::vector<int32_t>& list) {
    each(list, [this](int32_t word) { value(word); });
  }
  void text(const std::string& text) { all({text.begin(), text.end()}); }
  int32_t* at() const { return at_; }

 private:
  int32_t *at_, *const end_;
};

class Reader {
 public:
  Reader(const int32_t* begin, size_t words) : at_(begin), end_(begin + words) {}
  template <class Value>
  void value(Value& value) {
    const size_t words = sizeof value / 4;
    if (size_t(end_ - at_) < words) malformed();
    std::memcpy(&value, at_, sizeof value);
    at_ += words;
  }
  void number(int32_t& number) {
    value(number);
    if (number < 0) malformed();
  }
  template <class List, class Read>
  void each(List& list, const Read& read) {
    int32_t count;
    number(count);
    if (count > end_ - at_) malformed();
    for (; count > 0; --count) read(list.emplace_back());
  }
  void all(std::vector<int32_t>& list) {
    each(list, [this](int32_t& word) { value(word); });
  }
  void text(std::string& text) {
    std::vector<int32_t> letters;
    all(letters);
    text.assign(letters.begin(), letters.end());
  }
  bool ended() const { return at_ == end_; }

 private:
  const int32_t *at_, *const end_;
};

template <class Tables, class Pass>
void pass_tables(Tables& tables, Pass& pass) {
  tables.all(pass.wiped);
  tables.each(pass.copies, [&](auto& copy) { tables.number(copy.first), tables.number(copy.second); });
  tables.all(pass.closed);
  tables.each(pass.opened, [&](auto& opened) {
    tables.value(opened.answer);
    tables.number(opened.settings.end), tables.number(opened.settings.grammar);
    auto& sampling = opened.settings.sampling;
    tables.number(sampling.answer), tables.number(sampling.min_tokens);
    tables.value(sampling.logprobs), tables.value(sampling.top_k), tables.value(sampling.seed);
    for (auto* number : {&sampling.temperature, &sampling.top_p, &sampling.min_p, &sampling.repetition_penalty,
                         &sampling.presence_penalty, &sampling.frequency_penalty})
      tables.value(*number);
    tables.each(sampling.logit_bias, [&](auto& bias) { tables.value(bias.first), tables.value(bias.second); });
    tables.all(sampling.stop_ids);
  });
  tables.each(pass.parts, [&](auto& part) {
    tables.value(part.answer);
    for (auto* number : {&part.epoch, &part.start, &part.rows, &part.chooses, &part.known}) tables.number(*number);
    tables.all(part.ids), tables.all(part.blocks);
  });
}

// tapped: how many numbers of taps there are.
template <class Tables, class Verdict>
void verdict_tables(Tables& tables, Verdict& verdict, int32_t& tapped) {
  tables.all(verdict.dropped), tables.all(verdict.chosen);
  tables.each(verdict.logprobs, [&](auto& logprobs) {
    tables.value(logprobs.own);
    tables.each(logprobs.top, [&](auto& top) { tables.value(top.first), tables.value(top.second); });
  });
  tables.each(verdict.failures, [&](auto& failure) {
    tables.number(failure.part), tables.value(failure.grammar), tables.text(failure.why);
  });
  tables.number(tapped);
}

// -- a message ---------------------------------------------------------------------------------------------------------

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
  if (header.magic != WireHeader().magic) throw std::runtime_error("a message is not of wire version " + std::to_string(kWireVersion));
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
  pass_tables(tables, pass);
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
  pass_tables(tables, pass);
  for (const PassMessage::Opened& opened : pass.opened)
    if (opened.settings.sampling.logprobs < -1 || opened.settings.sampling.logprobs > kMostLogprobs) malformed();
  for (const PassPart& part : pass.parts) {
    const int64_t end = int64_t(part.start) + part.rows;
    if (part.rows > kPassRows || part.chooses > part.rows || part.known > part.start ||
        int64_t(part.ids.size()) != end - part.known || int64_t(part.blocks.size()) * kSpan < end)
      malformed();
  }
  if (!tables.ended() || pass.rows() != header.count || pass.parts.empty()) malformed();
  const int32_t *at = message + kWireIds + header.more, *end = message + words;
  pass.hidden = read_floats(at, end, size_t(header.count) * size_t(hidden));
  pass.tapped = read_floats(at + pass.hidden.size(), end, pass.hidden.size() * size_t(taps));
  return pass;
}

size_t write_verdict(const PassVerdict& verdict, int32_t* out) {
  Writer tables(out + kWireIds);
  int32_t tapped = int32_t(verdict.tapped.size());
  verdict_tables(tables, verdict, tapped);
  const int32_t flags = verdict.hidden.empty() ? 0 : kWireFeedback;
  size_t words = close_message(Wire::kChosen, verdict.number, int(verdict.chosen.size()), 0, flags, tables, out);
  words += write_floats(verdict.hidden, out + words);
  return words + write_floats(verdict.tapped, out + words);
}

PassVerdict read_verdict(const int32_t* message, size_t words, int hidden, int taps) {
  const WireHeader header = open_message(Wire::kChosen, message, words);
  Reader tables(message + kWireIds, size_t(header.more));
  PassVerdict verdict;
  verdict.number = header.number;
  int32_t tapped;
  verdict_tables(tables, verdict, tapped);
  if (!tables.ended() || int(verdict.chosen.size()) != header.count ||
      size_t(tapped) > size_t(kPassRows) * size_t(taps) * size_t(hidden))
    malformed();
  const int32_t *at = message + kWireIds + header.more, *end = message + words;
  if (header.flags & kWireFeedback) verdict.hidden = read_floats(at, end, size_t(header.count) * size_t(hidden));
  verdict.tapped = read_floats(at + verdict.hidden.size(), end, size_t(tapped));
  return verdict;
}

}  // namespace ppsd
