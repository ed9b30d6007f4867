// Keys and values on their way into the cache.
#pragma once

#include "cache_int8.h"
#include "vector_math.h"

namespace ppsd {
namespace {

inline void put_key(const KvCache& cache, int head, int position, int channel, V k) {
  const size_t at = (size_t(head) * (cache.capacity / kPanel) + position / kPanel) * cache.head_dim * kPanel +
                    size_t(channel) * kPanel + position % kPanel;
  if (cache.stored == Stored::kFp32) {
    float x[16];
    Simd::store(x, k);
    float* to = reinterpret_cast<float*>(cache.keys) + at;
    for (int l = 0; l < 16; ++l) to[l * kPanel] = x[l];
  } else {
    uint16_t x[16];
    Simd::store_bf16(x, k);
    uint16_t* to = reinterpret_cast<uint16_t*>(cache.keys) + at;
    for (int l = 0; l < 16; ++l) to[l * kPanel] = x[l];
  }
}

inline void put_value(const KvCache& cache, int head, int position, int channel, V v) {
  const size_t at = (size_t(head) * cache.capacity + position) * cache.head_dim + channel;
  if (cache.stored == Stored::kFp32) Simd::store(reinterpret_cast<float*>(cache.values) + at, v);
  else Simd::store_bf16(reinterpret_cast<uint16_t*>(cache.values) + at, v);
}

// Where the keys and values of a pass go. An int8 cache takes two panels of outputs together, a block: the first one waits.
struct Keep {
  const QkvPhase& phase;
  V waiting[kPassRows];

  explicit Keep(const QkvPhase& p) : phase(p) {}

  int position(int r) const { return phase.positions ? phase.positions[r] : phase.start + r; }
  void put(bool value, int r, int kv_head, int channel, V x) {
    const int place = position(r) % kSpan;
    const KvCache cache = phase.cache[phase.positions ? r : 0].of_span(position(r) / kSpan);
    if (cache.stored != Stored::kInt8) {
      if (value) put_value(cache, kv_head, place, channel, x);
      else put_key(cache, kv_head, place, channel, x);
    } else if (channel % kBlock == 0) {
      waiting[r] = x;
    } else {
      const Bytes bytes = to_bytes(waiting[r], x);
      channel -= kPanel;
      if (value) put_value_bytes(cache, kv_head, place, channel, bytes);
      else put_key_bytes(cache, kv_head, place, channel, bytes);
    }
  }
};

}  // namespace
}  // namespace ppsd
