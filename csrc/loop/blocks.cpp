#include "blocks.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>

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

}  // namespace ppsd
