// Asking memory for the weights that come next, while those at hand are multiplied.
#pragma once

#include "vector_math.h"

namespace ppsd {
namespace {

// The weights that come next are asked for, evenly over all row groups of a panel: so memory is as busy
// while a panel is used again from the cache as it is while it is read. A processor follows what is read within a page (of
// 4096 bytes, whatever pages the system has) and no further, so that one stream of reading does not fill the way to memory: it
// is asked from several pages in turn. Reading a window of them asks for the next window.
constexpr uintptr_t kStreams = 4, kPage = 4096, kWindow = kStreams * kPage, kTurn = kStreams * 64;

struct Ahead {
  uintptr_t from;              // what this row group stands for of the panel that is read, in turns
  uint32_t turns;              // for each block of 32 inputs, times 65536
  const uint8_t *end, *then;   // at `then` is what is read after `end`
};

inline void ask_turns(const Ahead& ahead, int first, int count) {
  for (uintptr_t at = ahead.from + first * kTurn, end = at + count * kTurn; at < end; at += kTurn) {
    const uintptr_t within = at % kWindow;
    const uint8_t* next = reinterpret_cast<const uint8_t*>(at - within + kWindow + within / kStreams);
    if (next + (kWindow - kPage) < ahead.end) {
      PPSD_UNROLL
      for (uintptr_t page = 0; page < kStreams; ++page) Simd::prefetch(next + page * kPage);
    } else {
      for (uintptr_t page = 0; page < kStreams; ++page, next += kPage)
        Simd::prefetch(next < ahead.end ? next : ahead.then + (next - ahead.end));
    }
  }
}

// A block's part of them. Few at a time: more than a core can wait for at once would hold it up.
inline void ask(const Ahead& ahead, int block) {
  const int first = int(uint32_t(block) * ahead.turns >> 16), end = int(uint32_t(block + 1) * ahead.turns >> 16);
  ask_turns(ahead, first, end - first);
}

// What each of several row groups asks for while it goes through a panel of a stretch that begins with panel `begin`.
class Asking {
 public:
  Asking(const Matrix& w, Format format, const ReadThen& next, int begin, int groups)
      : blocks_(w.inputs / kBlock), share_(w.panel_bytes(format) / groups) {
    const bool leads_on = next.then && begin < next.end;
    stop_ = w.panel(leads_on ? next.end : w.panels());
    then_ = leads_on ? next.then : stop_;
  }

  // The next group's; `from` is where the panel begins, before the first of them.
  Ahead share(uintptr_t* from) const {
    const uintptr_t begin = *from & ~(kTurn - 1), end = (*from += share_) & ~(kTurn - 1);
    const uint32_t turns = uint32_t((end - begin) / kTurn), blocks = uint32_t(blocks_);
    return {begin, ((turns << 16) + blocks - 1) / blocks, stop_, then_};   // rounded up: the last block asks for the last turn
  }

 private:
  int blocks_;
  size_t share_;
  const uint8_t *stop_, *then_;
};

}  // namespace
}  // namespace ppsd
