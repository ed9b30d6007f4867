// What one row of one head asks of the KV cache, in floats: scores, their weights, and the mixed values.
#pragma once

#include <utility>

#include "vector_math.h"

namespace ppsd {
namespace {

template <Stored S>
inline V load_cached(const uint8_t* cache, size_t at) {
  if constexpr (S == Stored::kFp32) return Simd::load(reinterpret_cast<const float*>(cache) + at);
  else return Simd::load_bf16(reinterpret_cast<const uint16_t*>(cache) + at);
}

// The next line of what is read later, if any is left.
inline void ask_one(ReadAhead* ahead) {
  if (ahead->begin >= ahead->end) {
    if (ahead->then_begin >= ahead->then_end) return;
    ahead->begin = std::exchange(ahead->then_begin, ahead->then_end);
    ahead->end = ahead->then_end;
  }
  Simd::prefetch_far(ahead->begin);
  ahead->begin += 64;
}

inline void ask_some(ReadAhead* ahead, int lines) {
  for (int i = 0; i < lines; ++i) ask_one(ahead);
}

struct QueryBytes;

// What one row of one head asks of the positions up to its own: online softmax (Milakov and Gimelshein, arXiv
// 1805.02867), span after span.
struct Query {
  const float* q;                // [head_dim], scaled
  float* mixed;                  // [head_dim], to be divided by `total` at the end
  int position;
  float largest, total;          // of the scores so far, and of their exponentials
  const QueryBytes* bytes;       // q for a cache of int8
  int from;                      // the first position that it sees
};

// Panels whose sums stay in registers beside each other, for each of Q queries.
constexpr int panels_together(int queries) {
  const int most = Simd::kSums / queries;
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// scores[query][position of the span], of J panels of positions from panel j on.
template <int Q, int J, Stored S>
inline void score(const KvCache& cache, size_t keys, int j, const Query* queries, ReadAhead* ahead,
                  float (&scores)[Q][kSpan]) {
  V sum[Q][J];
  PPSD_UNROLL
  for (int i = 0; i < Q; ++i)
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) sum[i][p] = Simd::zero();
  for (int c = 0; c < cache.head_dim; ++c) {
    ask_one(ahead);
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) {
      const V k = load_cached<S>(cache.keys, keys + (size_t(j + p) * cache.head_dim + c) * kPanel);
      PPSD_UNROLL
      for (int i = 0; i < Q; ++i) sum[i][p] = Simd::fma(k, Simd::set1(queries[i].q[c]), sum[i][p]);
    }
  }
  PPSD_UNROLL
  for (int i = 0; i < Q; ++i)
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) Simd::store(scores[i] + (j + p) * kPanel, sum[i][p]);
}

// J panels of channels from c on: what is mixed so far, shrunk, plus the span's first `count` values by their weights.
template <int Q, int J, Stored S>
inline void mix(const KvCache& cache, size_t values, int count, int c, const Query* queries, ReadAhead* ahead,
                const float (&weights)[Q][kSpan], const float* shrink) {
  V mixed[Q][J];
  PPSD_UNROLL
  for (int i = 0; i < Q; ++i)
    PPSD_UNROLL
    for (int p = 0; p < J; ++p)
      mixed[i][p] = Simd::mul(Simd::load(queries[i].mixed + c + p * kPanel), Simd::set1(shrink[i]));
  for (int t = 0; t < count; ++t) {
    ask_one(ahead);
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) {
      const V v = load_cached<S>(cache.values, values + size_t(t) * cache.head_dim + c + p * kPanel);
      PPSD_UNROLL
      for (int i = 0; i < Q; ++i) mixed[i][p] = Simd::fma(v, Simd::set1(weights[i][t]), mixed[i][p]);
    }
  }
  PPSD_UNROLL
  for (int i = 0; i < Q; ++i)
    PPSD_UNROLL
    for (int p = 0; p < J; ++p) Simd::store(queries[i].mixed + c + p * kPanel, mixed[i][p]);
}

// Of scores [query][position of the span] the weights, by `power`, which is of the base that the scores are in; and how much
// what was mixed before shrinks: of all queries at once, in the lanes of one register.
template <int Q, class Power>
inline void soften(Query* queries, int first, int count, Power&& power, float (&weights)[Q][kSpan], float (&shrink)[16]) {
  constexpr int kPanels = kSpan / kPanel;
  alignas(64) static const int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I lanes = Simd::loadi(kLanes);
  float sums[Q];
  for (int i = 0; i < Q; ++i) {
    V scores[kPanels], best = Simd::set1(-kInfinity), sum = Simd::zero();
    PPSD_UNROLL
    for (int j = 0; j < kPanels; ++j) {
      scores[j] = j * kPanel < count ? Simd::load(weights[i] + j * kPanel) : Simd::zero();
      if (queries[i].position < first + kSpan - 1) {
        const I position = Simd::addi(lanes, Simd::seti(first + j * kPanel));
        const auto later = Simd::less_i(Simd::seti(queries[i].position), position);
        scores[j] = Simd::select(later, Simd::set1(-kInfinity), scores[j]);
      }
      if (queries[i].from > first) {
        const I position = Simd::addi(lanes, Simd::seti(first + j * kPanel));
        const auto earlier = Simd::less_i(position, Simd::seti(queries[i].from));
        scores[j] = Simd::select(earlier, Simd::set1(-kInfinity), scores[j]);
      }
      best = Simd::max(best, scores[j]);
    }
    const float top = std::max(queries[i].largest, Simd::max_lanes(best));
    PPSD_UNROLL
    for (int j = 0; j < kPanels; ++j) {
      const V w = power(Simd::sub(scores[j], Simd::set1(top)));
      Simd::store(weights[i] + j * kPanel, w);
      sum = Simd::add(sum, w);
    }
    sums[i] = Simd::sum_lanes(sum);
    shrink[i] = queries[i].largest - top;   // -inf for the first span, which gives 0
    queries[i].largest = top;
  }
  Simd::store(shrink, power(Simd::load(shrink)));
  for (int i = 0; i < Q; ++i) queries[i].total = queries[i].total * shrink[i] + sums[i];
}

}  // namespace
}  // namespace ppsd
