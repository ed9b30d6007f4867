// What an int8 KV cache holds: keys and values in blocks of 32 channels, with a scale for each position.
// `KvCache` says where everything lies.
#pragma once

#include "vector_math.h"

namespace ppsd {
namespace {

// 32 channels of a key, a value or a query: sixteen from each register, as int8 times a scale.
struct Bytes {
  alignas(64) int8_t whole[kBlock];
  float scale;
  int32_t sum;
};

inline Bytes to_bytes(V first, V second) {
  Bytes out;
  const float largest = Simd::max_lanes(Simd::max(Simd::abs(first), Simd::abs(second)));
  const V inverse = Simd::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
  const I a = Simd::to_int(Simd::mul(first, inverse)), c = Simd::to_int(Simd::mul(second, inverse));
  Simd::store_i8(out.whole, a);
  Simd::store_i8(out.whole + 16, c);
  out.scale = largest / 127.0f;
  out.sum = Simd::sum_lanes(Simd::addi(a, c));
  return out;
}

inline float* scales_of(uint8_t* panel, int head_dim) { return reinterpret_cast<float*>(panel + size_t(kPanel) * head_dim); }
inline const float* scales_of(const uint8_t* panel, int head_dim) {
  return reinterpret_cast<const float*>(panel + size_t(kPanel) * head_dim);
}

// Keys meet the dot instruction as weights do, which have the offset.
inline void add_offset(Bytes* key) {
  for (int i = 0; i < kBlock; ++i) key->whole[i] = int8_t(uint8_t(key->whole[i]) + uint8_t(Simd::kWeightOffset));
}

// channel: the first of the block.
inline void put_key_bytes(const KvCache& cache, int head, int position, int channel, Bytes key) {
  add_offset(&key);
  uint8_t* panel = cache.panel(cache.keys, head, position);
  uint8_t* to = panel + size_t(channel) * kPanel + position % kPanel * 4;
  for (int i = 0; i < kBlock; i += 4, to += 4 * kPanel) std::memcpy(to, key.whole + i, 4);
  scales_of(panel, cache.head_dim)[channel / kBlock * kPanel + position % kPanel] = key.scale;
}

inline void put_value_bytes(const KvCache& cache, int head, int position, int channel, const Bytes& value) {
  uint8_t* panel = cache.panel(cache.values, head, position);
  const int lane = position % kPanel;
  uint8_t* to = panel + size_t(lane / 4) * cache.head_dim * 4 + channel * 4 + lane % 4;
  for (int i = 0; i < kBlock; ++i) to[4 * i] = uint8_t(value.whole[i]);
  scales_of(panel, cache.head_dim)[channel / kBlock * kPanel + lane] = value.scale;
}

}  // namespace
}  // namespace ppsd
