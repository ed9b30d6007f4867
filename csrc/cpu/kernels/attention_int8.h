// Attention to a KV cache of int8: products of integers, in blocks of 32 channels with a scale for each
// position. Sums of integers are exact, so their order does not matter; scales come to them in a fixed order.
#pragma once

#include "cache_int8.h"
#include "query.h"

namespace ppsd {
namespace {

constexpr int kAsk = 16;   // lines asked for with the keys of a block, half as many with sixteen values

// A query as the kernels want it.
struct QueryBytes {
  alignas(64) uint32_t words[kMostHeadDim / 4];
  float scales[kMostHeadDim / kBlock];
  int32_t corrections[kMostHeadDim / kBlock];   // what unsigned keys add too much
};

inline void make_query(const float* q, int head_dim, QueryBytes* out) {
  for (int b = 0; b < head_dim / kBlock; ++b) {
    const Bytes bytes = to_bytes(Simd::load(q + b * kBlock), Simd::load(q + b * kBlock + 16));
    std::memcpy(out->words + b * kBlock / 4, bytes.whole, kBlock);
    out->scales[b] = bytes.scale * 1.44269504088896341f;   // the weights are powers of 2
    out->corrections[b] = -Simd::kWeightOffset * bytes.sum;
  }
}

// scores[query][position of the span], of J panels of positions from panel j on; block after block.
template <int Q, int J>
inline void score_bytes(const KvCache& cache, const uint8_t* keys, int j, const Query* queries, ReadAhead* ahead,
                        float (&scores)[Q][kSpan]) {
  const size_t step = KvCache::panel_bytes(cache.head_dim);
  keys += j * step;
  for (int b = 0; b < cache.head_dim / kBlock; ++b) {
    I dot[Q][J];
    PPSD_UNROLL
    for (int i = 0; i < Q; ++i)
      PPSD_UNROLL
      for (int p = 0; p < J; ++p) dot[i][p] = Simd::seti(queries[i].bytes->corrections[b]);
    ask_some(ahead, kAsk);
    const uint8_t* block = keys + size_t(b) * kBlock * kPanel;
    PPSD_UNROLL
    for (int w = 0; w < kBlock / 4; ++w)
      PPSD_UNROLL
      for (int p = 0; p < J; ++p)
        PPSD_UNROLL
        for (int i = 0; i < Q; ++i)
          dot[i][p] = Simd::dot4(dot[i][p], Simd::bytes(block + p * step + w * 4 * kPanel),
                                 Simd::four(queries[i].bytes->words + b * kBlock / 4 + w));
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) {
      const V key_scale = Simd::load(scales_of(keys + p * step, cache.head_dim) + b * kPanel);
      PPSD_UNROLL
      for (int i = 0; i < Q; ++i) {
        float* score = scores[i] + (j + p) * kPanel;
        const V before = b == 0 ? Simd::zero() : Simd::load(score);
        const V scale = Simd::mul(key_scale, Simd::set1(queries[i].bytes->scales[b]));
        Simd::store(score, Simd::fma(Simd::to_float(dot[i][p]), scale, before));
      }
    }
  }
}

// What a query takes of a block of the span's values: shares (weights times the values' scales) as whole numbers of a unit.
struct Taken {
  alignas(64) uint32_t words[kSpan / 4];   // of four positions each
  float unit;
};

inline void take(const KvCache& cache, const uint8_t* values, int count, int b, const float* weights, Taken& out) {
  const size_t step = KvCache::panel_bytes(cache.head_dim);
  V shares[kSpan / kPanel], most = Simd::zero();
  PPSD_UNROLL
  for (int j = 0; j < kSpan / kPanel; ++j) {
    shares[j] = Simd::zero();
    if (j * kPanel < count)
      shares[j] = Simd::mul(Simd::load(weights + j * kPanel),
                            Simd::load(scales_of(values + j * step, cache.head_dim) + b * kPanel));
    most = Simd::max(most, shares[j]);
  }
  const float largest = Simd::max_lanes(most);
  const V inverse = Simd::set1(largest > 0.0f ? float(Simd::kMostShare) / largest : 0.0f);
  PPSD_UNROLL
  for (int j = 0; j < kSpan / kPanel; ++j)
    Simd::store_u8(reinterpret_cast<uint8_t*>(out.words) + j * kPanel, Simd::to_int(Simd::mul(shares[j], inverse)));
  out.unit = largest / float(Simd::kMostShare);
}

// J panels of channels from c on, of one block: what is mixed so far, shrunk, plus the shares of the span's values. Those
// after `count` have none. (Sums stay below 2^24, so that they are exact as floats too.)
template <int Q, int J>
inline void mix_bytes(const KvCache& cache, const uint8_t* values, int count, int c, const Query* queries, ReadAhead* ahead,
                      const Taken* taken, const float* shrink) {
  const size_t step = KvCache::panel_bytes(cache.head_dim);
  I sum[Q][J];
  PPSD_UNROLL
  for (int i = 0; i < Q; ++i)
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) sum[i][p] = Simd::seti(0);
  const size_t four_rows = size_t(cache.head_dim) * 4;
  for (int j = 0; j * kPanel < count; ++j) {
    ask_some(ahead, kAsk / 2);
    const uint8_t* at = values + j * step + size_t(c) * 4;
    PPSD_UNROLL
    for (int four = 0; four < kPanel / 4; ++four)
      PPSD_UNROLL
      for (int p = 0; p < J; ++p)
        PPSD_UNROLL
        for (int i = 0; i < Q; ++i)
          sum[i][p] = Simd::take4(sum[i][p], Simd::bytes(at + four * four_rows + p * 4 * kPanel),
                                  Simd::four(taken[i].words + j * kPanel / 4 + four));
  }
  PPSD_UNROLL
  for (int i = 0; i < Q; ++i)
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) {
      float* mixed = queries[i].mixed + c + p * kPanel;
      const V before = Simd::mul(Simd::load(mixed), Simd::set1(shrink[i]));
      Simd::store(mixed, Simd::fma(Simd::to_float(sum[i][p]), Simd::set1(taken[i].unit), before));
    }
}

// As attend_span.
template <int Q>
void attend_span_bytes(const KvCache& cache, int kv_head, int span, Query* queries, ReadAhead* ahead) {
  constexpr int J = panels_together(Q), kChannels = J >= 2 ? 2 : 1;
  const int head_dim = cache.head_dim, first = span * kSpan;
  const uint8_t* keys = cache.panel(cache.keys, kv_head, 0);
  const uint8_t* values = cache.panel(cache.values, kv_head, 0);
  const int count = std::min(queries[Q - 1].position - first + 1, kSpan);
  alignas(64) float weights[Q][kSpan];
  for (int j = 0; j * kPanel < count; j += J) score_bytes<Q, J>(cache, keys, j, queries, ahead, weights);
  float shrink[16] = {};
  soften<Q>(queries, first, count, [](V x) { return exp2_rough(x); }, weights, shrink);
  for (int b = 0; b < head_dim / kBlock; ++b) {
    Taken taken[Q];
    for (int i = 0; i < Q; ++i) take(cache, values, count, b, weights[i], taken[i]);
    for (int c = b * kBlock; c < (b + 1) * kBlock; c += kChannels * kPanel)
      mix_bytes<Q, kChannels>(cache, values, count, c, queries, ahead, taken, shrink);
  }
}

}  // namespace
}  // namespace ppsd
