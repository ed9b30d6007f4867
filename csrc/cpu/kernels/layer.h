// The phases of a layer, attention aside: a share of the panels each.
#pragma once

#include "kv_cache.h"
#include "matmul.h"
#include "pack.h"

namespace ppsd {
namespace {

// A row's channels of a head times `weight` over their root mean square, in place.
inline void normalize_head(float* x, int head_dim, const float* weight, float eps) {
  V squares = Simd::zero();
  for (int c = 0; c < head_dim; c += kPanel) {
    const V v = Simd::load(x + c);
    squares = Simd::fma(v, v, squares);
  }
  const V inverse = Simd::set1(1.0f / std::sqrt(Simd::sum_lanes(squares) / float(head_dim) + eps));
  for (int c = 0; c < head_dim; c += kPanel)
    Simd::store(x + c, Simd::mul(Simd::mul(Simd::load(x + c), inverse), Simd::load(weight + c)));
}

void qkv(const QkvPhase& phase, int begin, int end) {
  const KvCache& shape = *phase.cache;
  const int head_dim = shape.head_dim, panels_per_head = head_dim / kPanel;
  const V scale = Simd::set1(1.0f / std::sqrt(float(head_dim)));
  Keep keep(phase);
  const auto put = [&](int r, int head, int channel, V y) {
    if (const int kv_head = head - phase.heads - shape.kv_heads; kv_head >= 0) return keep.put(true, r, kv_head, channel, y);
    if (phase.rope) {
      const float* rope = phase.rope + (size_t(keep.position(r)) * head_dim + channel) * 2;
      y = Simd::fma(Simd::swap_halves(y), Simd::load(rope + kPanel), Simd::mul(y, Simd::load(rope)));
    }
    if (const int kv_head = head - phase.heads; kv_head >= 0) return keep.put(false, r, kv_head, channel, y);
    Simd::store(phase.queries + (size_t(r) * phase.heads + head) * head_dim + channel, Simd::mul(y, scale));
  };
  const auto biased = [&](int p, V y) { return phase.bias ? Simd::add(y, Simd::load(phase.bias + p * kPanel)) : y; };

  const int normed = phase.norms.queries ? (phase.heads + shape.kv_heads) * panels_per_head : 0;   // panels of q and k
  float waiting[kPassRows][kMostHeadDim];
  for (; begin < std::min(end, normed); begin += panels_per_head) {
    multiply(*phase.weights, *phase.input, phase.next, begin, begin + panels_per_head,
             [&](int r, int p, V y) { Simd::store(waiting[r] + (p - begin) * kPanel, biased(p, y)); });
    const int head = begin / panels_per_head;
    for (int r = 0; r < phase.rows; ++r) {
      normalize_head(waiting[r], head_dim, head < phase.heads ? phase.norms.queries : phase.norms.keys, phase.norms.eps);
      for (int c = 0; c < head_dim; c += kPanel) put(r, head, c, Simd::load(waiting[r] + c));
    }
  }
  multiply(*phase.weights, *phase.input, phase.next, begin, end, [&](int r, int p, V y) {
    put(r, p / panels_per_head, p % panels_per_head * kPanel, biased(p, y));
  });
}

void add(const AddPhase& phase, int begin, int end) {
  const int width = phase.weights->outputs;
  multiply(*phase.weights, *phase.input, phase.next, begin, end, [&](int r, int p, V y) {
    if (phase.bias) y = Simd::add(y, Simd::load(phase.bias + p * kPanel));
    float* x = phase.x + size_t(r) * width + p * kPanel;
    Simd::store(x, Simd::add(Simd::load(x), y));
  });
}

void swiglu(const SwigluPhase& phase, int begin, int end) {
  float waiting[kPassRows][4 * kPanel];   // gate and up of two panels each
  for (int unit = begin; unit < end; ++unit) {
    multiply(*phase.weights, *phase.input, phase.next, 4 * unit, 4 * unit + 4,
             [&](int r, int p, V y) {
               if (phase.bias) y = Simd::add(y, Simd::load(phase.bias + p * kPanel));
               Simd::store(waiting[r] + p % 4 * kPanel, y);
             });
    for (int r = 0; r < phase.rows; ++r) {
      const float* w = waiting[r];
      const V a = Simd::mul(silu(Simd::load(w)), Simd::load(w + 16));
      const V c = Simd::mul(silu(Simd::load(w + 32)), Simd::load(w + 48));
      put_block(*phase.output, r, unit, a, c);
    }
  }
}

}  // namespace
}  // namespace ppsd
