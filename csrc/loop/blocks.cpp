#include "blocks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>

#include "../cpu/packed_file.h"

namespace ppsd {
namespace {

constexpr int kWorthCopying = 8;   // rows: to compute fewer takes no longer than to copy a block

}  // namespace

Blocks::Blocks(size_t block_bytes, int count) : bytes_(block_bytes), memory_(block_bytes * size_t(count)), states_(count) {
#ifdef MADV_DONTFORK
  // A loop ends with its process. Where several reserve half of the memory each, there would be no memory for a fork.
  madvise(memory_.as<>(), memory_.bytes(), MADV_DONTFORK);
#endif
  for (int block = count - 1; block >= 0; --block) unused_.push_back(block);
}

std::optional<int> Blocks::take() {
  int block = -1;
  if (!unused_.empty()) {
    block = unused_.back();
    unused_.pop_back();
  } else if (!idle_.empty()) {
    block = idle_.front();
    idle_.pop_front();
    index_.erase(states_[block].key);
    states_[block] = {};
  } else {
    return std::nullopt;
  }
  states_[block].holders = 1;
  return block;
}

void Blocks::hold(int block) {
  if (states_[block].holders++ == 0) idle_.erase(states_[block].place);
}

void Blocks::release(int block) {
  State& state = states_[block];
  if (--state.holders > 0) return;
  if (state.content == 0) unused_.push_back(block);
  else state.place = idle_.insert(idle_.end(), block);
}

void Blocks::wipe(int block) {
  std::memset(at(block), 0, bytes_);
  if (notes_) changes_.wiped.push_back(block);
}

void Blocks::copy(int from, int to) {
  std::memcpy(at(to), at(from), bytes_);
  if (notes_) changes_.copies.emplace_back(from, to);
}

std::optional<Blocks::Shared> Blocks::share(Content before, const int* ids, bool saved) {
  const auto found = index_.find({before, {ids, ids + kSpan}});
  if (found == index_.end()) return std::nullopt;
  hold(found->second);
  states_[found->second].saved |= saved;
  return Shared{found->second, states_[found->second].content};
}

std::pair<int, int> Blocks::like(Content before, const int* ids, int most) const {
  const Key wanted{before, {ids, ids + most}};
  std::pair<int, int> best{-1, 0};
  const auto look = [&](std::map<Key, int>::const_iterator other) {
    if (other->first.first != before) return;
    const auto& theirs = other->first.second;
    const auto differ = std::mismatch(wanted.second.begin(), wanted.second.end(), theirs.begin(), theirs.end());
    const int same = int(differ.first - wanted.second.begin());
    if (same > best.second) best = {other->second, same};
  };
  const auto after = index_.lower_bound(wanted);   // in the order of ids, those that begin alike are neighbours
  if (after != index_.end()) look(after);
  if (after != index_.begin()) look(std::prev(after));
  return best;
}

Blocks::Shared Blocks::keep(int block, Content before, const int* ids, int count, bool saved) {
  const Key key{before, {ids, ids + count}};
  if (const auto other = index_.find(key); other != index_.end()) {
    hold(other->second);
    states_[other->second].saved |= saved;
    release(block);
    return {other->second, states_[other->second].content};
  }
  State& state = states_[block];
  state.key = key;
  state.content = ++last_content_;
  state.saved = saved;
  index_[state.key] = block;
  return {block, state.content};
}

void BlockTable::add(int block) {
  held_.push_back(block);
  pointers_.push_back(blocks_->at(block));
}

int BlockTable::share(const std::vector<int>& ids, int most) {
  for (; (kept_ + 1) * kSpan <= most; ++kept_) {
    const auto shared = blocks_->share(content_, ids.data() + kept_ * kSpan, saved_);
    if (!shared) break;
    for (; size() > kept_; held_.pop_back(), pointers_.pop_back()) blocks_->release(held_.back());   // reserved in advance
    add(shared->block);
    content_ = shared->content;
  }
  return kept_ * kSpan;
}

int BlockTable::copy_rest(const std::vector<int>& ids, int most) {
  const int here = kept_ * kSpan;
  const auto [block, rows] = blocks_->like(content_, ids.data() + here, std::clamp(most - here, 0, kSpan));
  if (rows < kWorthCopying) return here;
  blocks_->hold(block);   // or it might be taken now
  const bool room = reserve(here + rows);
  if (room) blocks_->copy(block, held_[size_t(kept_)]);
  blocks_->release(block);
  return room ? here + rows : here;
}

bool BlockTable::reserve(int rows) {
  while (size() * kSpan < rows) {
    const auto block = blocks_->take();
    if (!block) return false;
    add(*block);
  }
  return true;
}

void BlockTable::keep(const std::vector<int>& ids, int rows) {
  for (; (kept_ + 1) * kSpan <= rows; ++kept_) {
    const auto shared = blocks_->keep(held_[kept_], content_, ids.data() + kept_ * kSpan, kSpan, saved_);
    held_[kept_] = shared.block;
    pointers_[kept_] = blocks_->at(shared.block);
    content_ = shared.content;
  }
}

void BlockTable::leave(const std::vector<int>& ids, int rows) {
  keep(ids, rows);
  const int more = rows - kept_ * kSpan;
  if (more >= kWorthCopying)
    held_[size_t(kept_)] = blocks_->keep(held_[size_t(kept_)], content_, ids.data() + kept_ * kSpan, more, saved_).block;
  drop();
}

// The last ones first: of a text, what stands at its beginning is the last to be forgotten.
void BlockTable::drop() {
  for (; !held_.empty(); held_.pop_back()) blocks_->release(held_.back());
  pointers_.clear();
  kept_ = 0;
  content_ = root_;
}

void BlockTable::wipe() {
  for (int i = kept_; i < size(); ++i) blocks_->wipe(held_[i]);
  drop();
}

// -- in a file, one after the other, each of the same size: what it holds, its numbers, and a checksum of both ---------

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
