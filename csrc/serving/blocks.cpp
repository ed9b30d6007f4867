#include "blocks.h"

#include <sys/mman.h>

#include <cstring>

#include "../cpu/kernels.h"

namespace ppsd {

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

void Blocks::wipe(int block) { std::memset(at(block), 0, bytes_); }

std::optional<Blocks::Shared> Blocks::share(Content before, const int* ids) {
  const auto found = index_.find({before, {ids, ids + kSpan}});
  if (found == index_.end()) return std::nullopt;
  hold(found->second);
  return Shared{found->second, states_[found->second].content};
}

Blocks::Shared Blocks::keep(int block, Content before, const int* ids) {
  if (const auto other = share(before, ids)) {
    release(block);
    return *other;
  }
  State& state = states_[block];
  state.key = {before, {ids, ids + kSpan}};
  state.content = ++last_content_;
  index_[state.key] = block;
  return {block, state.content};
}

void BlockTable::add(int block) {
  held_.push_back(block);
  pointers_.push_back(blocks_->at(block));
}

int BlockTable::share(const std::vector<int>& ids, int most) {
  for (; (kept_ + 1) * kSpan <= most; ++kept_) {
    const auto shared = blocks_->share(content_, ids.data() + kept_ * kSpan);
    if (!shared) break;
    for (; size() > kept_; held_.pop_back(), pointers_.pop_back()) blocks_->release(held_.back());   // reserved in advance
    add(shared->block);
    content_ = shared->content;
  }
  return kept_ * kSpan;
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
    const auto shared = blocks_->keep(held_[kept_], content_, ids.data() + kept_ * kSpan);
    held_[kept_] = shared.block;
    pointers_[kept_] = blocks_->at(shared.block);
    content_ = shared.content;
  }
}

// The last ones first: of a text, what stands at its beginning is the last to be forgotten.
void BlockTable::drop() {
  for (; !held_.empty(); held_.pop_back()) blocks_->release(held_.back());
  pointers_.clear();
  kept_ = 0;
  content_ = 0;
}

void BlockTable::wipe() {
  for (int i = kept_; i < size(); ++i) blocks_->wipe(held_[i]);
  drop();
}

}  // namespace ppsd
