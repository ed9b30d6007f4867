// Blocks in a file, one after the other, each of the same size: what it holds, its numbers, and a checksum of both.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "../cpu/packed_file.h"
#include "blocks.h"

namespace ppsd {
namespace {

struct Entry {
  uint64_t checksum;   // of what follows, and of the block's bytes
  uint64_t before;     // where the text begins: see BlockTable
  int32_t number;      // of this entry
  int32_t after;       // the entry that stands before it, an earlier one; -1: `before` does
  int32_t count;       // ids
  int32_t ids[kSpan];
};

uint64_t sum_of(const Entry& entry, const uint8_t* block, size_t bytes) {
  const auto* facts = reinterpret_cast<const uint8_t*>(&entry) + sizeof(entry.checksum);
  return 31 * checksum_of(facts, sizeof(entry) - sizeof(entry.checksum), nullptr) + checksum_of(block, bytes, nullptr);
}

bool begins_text(uint64_t before) { return before == 0 || before >> 63 != 0; }   // see BlockTable

bool read_all(int file, void* to, size_t bytes, int64_t at) {
  for (auto* place = static_cast<uint8_t*>(to); bytes > 0;) {
    const ssize_t done = pread(file, place, bytes, off_t(at));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    place += done, at += done, bytes -= size_t(done);
  }
  return true;
}

}  // namespace

int Blocks::write(int file, int64_t at, int most) const {
  std::vector<int> order;   // what stands before a block comes before it: `drop` releases the end of a text first
  for (int block = 0; block < count(); ++block)
    if (states_[size_t(block)].holders > 0 && states_[size_t(block)].content != 0) order.push_back(block);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return states_[size_t(a)].content < states_[size_t(b)].content; });
  order.insert(order.end(), idle_.rbegin(), idle_.rend());
  order.erase(std::remove_if(order.begin(), order.end(), [&](int block) { return !states_[size_t(block)].saved; }), order.end());
  if (order.size() > size_t(std::max(most, 0))) order.resize(size_t(std::max(most, 0)));
  std::map<Content, int> numbers;
  for (const int block : order) {
    const State& state = states_[size_t(block)];
    const auto before = numbers.find(state.key.first);
    if (before == numbers.end() && !begins_text(state.key.first)) continue;   // what stood before it has been forgotten
    Entry entry{};
    entry.before = state.key.first;
    entry.number = int(numbers.size());
    entry.after = before == numbers.end() ? -1 : before->second;
    entry.count = int(state.key.second.size());
    std::copy(state.key.second.begin(), state.key.second.end(), entry.ids);
    entry.checksum = sum_of(entry, this->at(block), bytes_);
    write_all(file, &entry, sizeof(entry), at);
    write_all(file, this->at(block), bytes_, at + int64_t(sizeof(entry)));
    at += int64_t(sizeof(entry) + bytes_);
    numbers[state.content] = entry.number;
  }
  return int(numbers.size());
}

int Blocks::read(int file, int64_t at, int count) {
  std::vector<std::optional<Shared>> here;
  for (int number = 0; number < count && !unused_.empty(); ++number, at += int64_t(sizeof(Entry) + bytes_)) {
    here.emplace_back();
    Entry entry;
    if (!read_all(file, &entry, sizeof(entry), at)) break;
    const bool fits = entry.number == number && entry.after >= -1 && entry.after < number && entry.count > 0 && entry.count <= kSpan;
    if (!fits || !(entry.after < 0 ? begins_text(entry.before) : here[size_t(entry.after)].has_value())) continue;
    const int block = *take();
    const bool whole = read_all(file, this->at(block), bytes_, at + int64_t(sizeof(entry)));
    if (!whole || entry.checksum != sum_of(entry, this->at(block), bytes_)) {
      wipe(block);
      release(block);
      continue;
    }
    here.back() = keep(block, entry.after < 0 ? entry.before : here[size_t(entry.after)]->content, entry.ids, entry.count);
  }
  int kept = 0;
  for (; !here.empty(); here.pop_back())   // the most recently used last
    if (here.back()) release(here.back()->block), ++kept;
  return kept;
}

}  // namespace ppsd
