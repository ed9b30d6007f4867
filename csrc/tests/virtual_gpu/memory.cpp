#include "memory.h"

#include <algorithm>

namespace virtual_gpu {

void add(std::vector<Seen>& into, const Seen& one) {
  for (Seen& each : into)
    if (each.grid == one.grid && each.cta == one.cta && (each.epoch < one.epoch || each.thread == one.thread)) {
      each.epoch = std::max(each.epoch, one.epoch), each.thread = one.thread;
      return;
    }
  into.push_back(one);
}

void merge(std::vector<Seen>& into, const std::vector<Seen>& from, const Order& known) {
  for (const Seen& each : from)
    if (!known.has(each.grid)) add(into, each);
  into.erase(std::remove_if(into.begin(), into.end(), [&](const Seen& each) { return known.has(each.grid); }), into.end());
}

void Shared::begin(int size) {
  bytes.assign(size_t(size), 0xFF);   // NaNs, and numbers that point nowhere
  if (uses.size() < size_t(size)) uses.resize(size_t(size));
}

const char* Shared::note(uint32_t from, int size, int warp, bool writes, bool changes, uint32_t epoch) {
  const uint16_t me = uint16_t(1 << warp), others = uint16_t(~me);
  const char* fault = nullptr;
  for (uint32_t byte = from; byte < from + uint32_t(size); ++byte) {
    Use& use = uses[byte];
    if (use.epoch != epoch) use = {epoch, 0, 0};
    if ((use.writer & others) && (changes || !writes)) fault = "another warp has written there since the last barrier";
    if (changes && (use.readers & others)) fault = "another warp has read there since the last barrier";
    (writes ? use.writer : use.readers) |= me;
  }
  return fault;
}

}  // namespace virtual_gpu
