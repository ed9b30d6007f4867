// Attention of all rows of a pass to the KV cache, span by span.
#pragma once

#include "attention_int8.h"
#include "kv_cache.h"
#include "query.h"

namespace ppsd {
namespace {

// Q queries of one KV head over one span of positions; `cache` is that of the span. Queries that come before the span are
// not passed in, so every query sees the same spans in the same order, whatever other queries it shares them with. (What
// comes after the last of them is left out, or weighs exactly nothing; so does what lies in front of a query's window.)
template <int Q, Stored S>
void attend_span(const KvCache& cache, int kv_head, int span, Query* queries, ReadAhead* ahead) {
  constexpr int J = panels_together(Q);
  const int head_dim = cache.head_dim, first = span * kSpan;
  const size_t at = size_t(kv_head) * cache.capacity * head_dim;   // of the span's keys, and of its values
  const int count = std::min(queries[Q - 1].position - first + 1, kSpan);
  alignas(64) float weights[Q][kSpan];
  for (int j = 0; j * kPanel < count; j += J) score<Q, J, S>(cache, at, j, queries, ahead, weights);
  float shrink[16] = {};
  soften<Q>(queries, first, count, [](V x) { return exp(x); }, weights, shrink);

  int c = 0;
  for (; c + J * kPanel <= head_dim; c += J * kPanel) mix<Q, J, S>(cache, at, count, c, queries, ahead, weights, shrink);
  for (; c < head_dim; c += kPanel) mix<Q, 1, S>(cache, at, count, c, queries, ahead, weights, shrink);
}

template <int Q, Stored S>
inline void attend_some(const KvCache& cache, int kv_head, int span, Query* queries, int count, ReadAhead* ahead) {
  if constexpr (Q > 1) {
    if (count < Q) return attend_some<Q - 1, S>(cache, kv_head, span, queries, count, ahead);
  }
  if constexpr (S == Stored::kInt8) attend_span_bytes<Q>(cache, kv_head, span, queries, ahead);
  else attend_span<Q, S>(cache, kv_head, span, queries, ahead);
}

template <Stored S>
void attend_unit(const AttendPhase& phase, int unit) {
  const KvCache& cache = *phase.cache;
  const int head_dim = cache.head_dim, group = phase.group(), parts = phase.parts();
  const int kv_head = unit / parts, part = unit % parts, all = phase.rows * group;
  const int begin = part * all / parts, count = (part + 1) * all / parts - begin;
  ReadAhead none, *ahead = phase.ahead ? phase.ahead : &none;
  Query queries[kAttendTogether];
  [[maybe_unused]] QueryBytes bytes[S == Stored::kInt8 ? kAttendTogether : 1];
  for (int i = 0; i < count; ++i) {
    const int row = (begin + i) / group, head = kv_head * group + (begin + i) % group;
    const size_t at = (size_t(row) * phase.heads + head) * head_dim;
    queries[i] = {phase.queries + at, phase.mixed + at, phase.start + row, -kInfinity, 0.0f, nullptr, 0};
    if constexpr (S == Stored::kInt8) {
      make_query(queries[i].q, head_dim, &bytes[i]);
      queries[i].bytes = &bytes[i];
    }
    if (phase.window > 0) queries[i].from = std::max(0, queries[i].position - phase.window + 1);
    std::fill(queries[i].mixed, queries[i].mixed + head_dim, 0.0f);
  }
  // Queries are in order of their positions, which follow one another: those that a span concerns lie together, the last
  // ones or, with a window, those that do not begin after it.
  for (int span = queries[0].from / kSpan, from = 0; span <= queries[count - 1].position / kSpan; ++span) {
    int to = count;
    while (queries[from].position < span * kSpan) ++from;
    attend_some<kAttendTogether, S>(cache.of_span(span), kv_head, span, queries + from, to - from, ahead);
  }
  for (int i = 0; i < count; ++i) {
    const V inverse = Simd::set1(1.0f / queries[i].total);
    float* out = queries[i].mixed;
    for (int c = 0; c < head_dim; c += kPanel) Simd::store(out + c, Simd::mul(Simd::load(out + c), inverse));
  }
}

void attend(const AttendPhase& phase, int begin, int end) {
  for (int unit = begin; unit < end; ++unit) {
    switch (phase.cache->stored) {
      case Stored::kFp32: attend_unit<Stored::kFp32>(phase, unit); break;
      case Stored::kInt8: attend_unit<Stored::kInt8>(phase, unit); break;
      default: attend_unit<Stored::kBf16>(phase, unit);
    }
  }
}

}  // namespace
}  // namespace ppsd
