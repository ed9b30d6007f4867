// The kernels, written once over `Simd` (simd_*.h). Included by one kernels_*.cpp for each instruction set, whose
// compiler flags it must not escape: everything here is in an unnamed namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "../pipeline/noise.h"
#include "half.h"
#include "kernels.h"

namespace ppsd {
namespace {

using V = Simd::V;
using I = Simd::I;

// For loops over the sums of a micro-kernel: unrolled early, so that the sums live in registers from the start.
#if defined(__clang__)
#define PPSD_UNROLL _Pragma("unroll")
#else
#define PPSD_UNROLL _Pragma("GCC unroll 16")
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// -- small pieces ------------------------------------------------------------------------------------------------------

// e^x; 0 below -87 and for -inf, 2.4e38 at most. Polynomial of Cephes (expf), relative error below 2e-7.
inline V exp(V x) {
  const V low = Simd::set1(-87.0f);
  const V clamped = Simd::min(Simd::max(x, low), Simd::set1(88.3f));
  const V n = Simd::round(Simd::mul(clamped, Simd::set1(1.44269504088896341f)));
  V r = Simd::fma(n, Simd::set1(-0.693359375f), clamped);
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  V p = Simd::set1(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = Simd::fma(p, r, Simd::set1(c));
  p = Simd::add(Simd::fma(p, Simd::mul(r, r), r), Simd::set1(1.0f));
  const I exponent = Simd::shift_left(Simd::addi(Simd::to_int(n), Simd::seti(127)), 23);
  return Simd::select(Simd::less(x, low), Simd::zero(), Simd::mul(p, Simd::bits_to_float(exponent)));
}

// 2^x for x <= 0, to be rounded to a few bits: relative error below 3e-6; 0 below -60 and for -inf. (Numbers that are almost
// too small for a float would cost a hundred times as much to multiply.)
inline V exp2_rough(V x) {
  const V low = Simd::set1(-60.0f), clamped = Simd::max(low, x);
  const V n = Simd::round(clamped), f = Simd::sub(clamped, n);
  V p = Simd::set1(0.009582853f);   // the least maximum of the error that this degree has on [-1/2, 1/2], with p(0) = 1
  for (float c : {0.055906426f, 0.24024099f, 0.69312418f, 1.0f}) p = Simd::fma(p, f, Simd::set1(c));
  return Simd::select(Simd::less(x, low), Simd::zero(), Simd::scale2(p, n));
}

// Natural logarithm of x > 0 (normal). Polynomial of Cephes (logf).
inline V log(V x) {
  const I bits = Simd::float_to_bits(x);
  const I mantissa = Simd::bit_or(Simd::bit_and(bits, Simd::seti(0x007FFFFF)), Simd::seti(0x3F000000));
  V m = Simd::bits_to_float(mantissa);   // [0.5, 1)
  V e = Simd::to_float(Simd::addi(Simd::shift_right(bits, 23), Simd::seti(-126)));
  const auto small = Simd::less(m, Simd::set1(0.707106781186547524f));
  e = Simd::sub(e, Simd::select(small, Simd::set1(1.0f), Simd::zero()));
  m = Simd::sub(Simd::add(m, Simd::select(small, m, Simd::zero())), Simd::set1(1.0f));
  const V z = Simd::mul(m, m);
  V p = Simd::set1(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = Simd::fma(p, m, Simd::set1(c));
  p = Simd::mul(Simd::mul(p, m), z);
  p = Simd::fma(e, Simd::set1(-2.12194440e-4f), p);
  p = Simd::fma(z, Simd::set1(-0.5f), p);
  return Simd::fma(e, Simd::set1(0.693359375f), Simd::add(m, p));
}

inline V silu(V x) {
  return Simd::div(x, Simd::add(Simd::set1(1.0f), exp(Simd::sub(Simd::zero(), x))));
}

// The noise of one position: Philox (noise.h), with what is the same for all ids worked out once.
class Noise {
 public:
  Noise() = default;
  Noise(uint64_t seed, int position) {
    PhiloxKey key(seed);
    for (int round = 0; round < kRounds; ++round, key.low += 0x9E3779B9u, key.high += 0xBB67AE85u) {
      low_[round] = key.low;
      high_[round] = key.high;
    }
    // The counter is (id, position, stream, 0): of the first round's products one has no id in it, of the second's the other.
    const uint64_t first = uint64_t(kSamplingStream) * kM1;
    const uint64_t second = uint64_t(uint32_t(first >> 32) ^ uint32_t(position) ^ low_[0]) * kM0;
    low_[1] ^= uint32_t(first);
    high_[1] ^= uint32_t(second >> 32);
    rest_ = uint32_t(second);
  }

  // A uniform word for each of sixteen ids.
  I words(I ids) const {
    I c0, c1, c2, c3;
    Simd::mul_wide(ids, kM0, &c2, &c3);
    Simd::mul_wide(Simd::bit_xor(c2, Simd::seti(int32_t(high_[0]))), kM1, &c0, &c1);
    c0 = Simd::bit_xor(c0, Simd::seti(int32_t(low_[1])));
    c2 = Simd::bit_xor(c3, Simd::seti(int32_t(high_[1])));
    c3 = Simd::seti(int32_t(rest_));
    PPSD_UNROLL
    for (int round = 2; round < kRounds; ++round) {
      I high0, low0, high1, low1;
      Simd::mul_wide(c0, kM0, &high0, &low0);
      Simd::mul_wide(c2, kM1, &high1, &low1);
      c0 = Simd::bit_xor(Simd::bit_xor(high1, c1), Simd::seti(int32_t(low_[round])));
      c2 = Simd::bit_xor(Simd::bit_xor(high0, c3), Simd::seti(int32_t(high_[round])));
      c1 = low1;
      c3 = low0;
    }
    return c0;
  }

 private:
  static constexpr int kRounds = 10;
  static constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u;
  uint32_t low_[kRounds], high_[kRounds], rest_;
};

// u of noise.h, in (0, 1).
inline V uniform(I words) {
  const V scaled = Simd::add(Simd::mul(Simd::unsigned_to_float(words), Simd::set1(0x1p-32f)), Simd::set1(0x1p-33f));
  return Simd::min(scaled, Simd::set1(1.0f - 0x1p-24f));
}

// -log(-log1p(-u))
inline V gumbel_noise(V u) {
  // log1p(-u) without losing small u (Kahan): with w = 1 - u, log(w) * -u / (w - 1), or -u where w rounds to 1.
  const V w = Simd::sub(Simd::set1(1.0f), u), d = Simd::sub(Simd::set1(1.0f), w);
  const V quotient = Simd::div(Simd::mul(log(w), u), Simd::max(d, Simd::set1(0x1p-40f)));
  const V log1p = Simd::select(Simd::less(Simd::zero(), d), quotient, Simd::sub(Simd::zero(), u));
  return Simd::sub(Simd::zero(), log(Simd::sub(Simd::zero(), log1p)));
}

// No less than gumbel_noise(u), and at most 0.06 more than -log(u): -log1p(-u) > u, and the bits of a float are, as a number,
// its logarithm with straight lines from power of two to power of two, which lie below the curve.
inline V gumbel_bound(V u) {
  const V bits = Simd::to_float(Simd::float_to_bits(u));
  return Simd::fma(bits, Simd::set1(-0.693147181f * 0x1p-23f), Simd::set1(127.0f * 0.693147181f));
}

constexpr float kMostNoise = 23.0f;   // gumbel_noise(2^-33) = 22.87

// A little less than the score to beat, whatever was rounded on the way to either.
inline float below(float score) { return score - (0.01f + 1e-6f * std::fabs(score)); }

// Whether one of sixteen scores can be better than the best so far, with the most noise that there is (temperature 0: none).
inline bool may_win(V scores, float inverse_temperature, const Candidate& best) {
  if (inverse_temperature == 0.0f) return Simd::any(Simd::less(Simd::set1(best.score), scores));
  return Simd::any(Simd::less(Simd::set1(below(best.score) - kMostNoise), Simd::mul(scores, Simd::set1(inverse_temperature))));
}

// The best of the first `count` of sixteen scores, if it is better than the best so far.
inline void choose_best(V scores, const int32_t* ids, int count, Candidate* best) {
  float some[16];
  Simd::store(some, scores);
  for (int l = 0; l < count; ++l)
    if (const Candidate candidate{some[l], ids[l]}; candidate < *best) *best = candidate;
}

// Sixteen scores over the temperature, with noise, against the best so far. Nearly always it is plain that none is better
// before the noise is known to the last digit.
inline void choose_noisy(V scores, float inverse_temperature, const Noise& noise, const int32_t* ids, int count,
                         Candidate* best) {
  const V inverse = Simd::set1(inverse_temperature);
  const V u = uniform(noise.words(Simd::loadi(ids)));
  const V at_most = Simd::add(Simd::mul(scores, inverse), gumbel_bound(u));
  if (!Simd::any(Simd::less(Simd::set1(below(best->score)), at_most))) return;
  choose_best(Simd::fma(scores, inverse, gumbel_noise(u)), ids, count, best);
}

inline V load_stored(const void* row, Stored stored, int i) {
  switch (stored) {
    case Stored::kFp16: return Simd::load_f16(static_cast<const uint16_t*>(row) + i);
    case Stored::kBf16: return Simd::load_bf16(static_cast<const uint16_t*>(row) + i);
    case Stored::kFp32: case Stored::kInt8: break;
  }
  return Simd::load(static_cast<const float*>(row) + i);
}

// -- activations -------------------------------------------------------------------------------------------------------

// 32 values of a row into the activations' format: block b of row r.
inline void put_block(const Activations& out, int r, int b, V first, V second) {
  alignas(64) uint32_t words[kBlock];
  int count = kBlock;
  if (out.format == Format::kFp32) {
    Simd::store(reinterpret_cast<float*>(words), first);
    Simd::store(reinterpret_cast<float*>(words) + 16, second);
  } else if (out.format == Format::kBf16) {
    alignas(64) uint16_t halves[kBlock];
    Simd::store_bf16(halves, first);
    Simd::store_bf16(halves + 16, second);
    if constexpr (Simd::kBf16Words == 1) {
      std::memcpy(words, halves, sizeof halves);
      count /= 2;
    } else {
      Simd::store(reinterpret_cast<float*>(words), Simd::load_bf16(halves));
      Simd::store(reinterpret_cast<float*>(words) + 16, Simd::load_bf16(halves + 16));
    }
  } else {
    const float largest = Simd::max_lanes(Simd::max(Simd::abs(first), Simd::abs(second)));
    const V inverse = Simd::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    const I a = Simd::to_int(Simd::mul(first, inverse)), c = Simd::to_int(Simd::mul(second, inverse));
    Simd::store_i8(reinterpret_cast<int8_t*>(words), a);
    Simd::store_i8(reinterpret_cast<int8_t*>(words) + 16, c);
    count /= 4;
    const size_t at = size_t(b) * out.rows + r;
    out.scales[at] = largest / 127.0f;
    out.corrections[at] = -Simd::kWeightOffset * Simd::sum_lanes(Simd::addi(a, c));
  }
  if (out.row_major) {
    std::memcpy(out.words + (size_t(r) * (out.width / kBlock) + b) * count, words, size_t(count) * 4);
    return;
  }
  uint32_t* to = out.words + size_t(b) * count * out.rows + r;
  if (out.rows == 1) std::memcpy(to, words, size_t(count) * 4);
  else for (int i = 0; i < count; ++i, to += out.rows) *to = words[i];
}

void normalize(const float* x, int rows, const float* weight, float eps, const Activations& out) {
  const int width = out.width;
  for (int r = 0; r < rows; ++r, x += width) {
    V squares = Simd::zero();
    for (int i = 0; i < width; i += 16) {
      const V v = Simd::load(x + i);
      squares = Simd::fma(v, v, squares);
    }
    const V inverse = Simd::set1(1.0f / std::sqrt(Simd::sum_lanes(squares) / float(width) + eps));
    for (int i = 0; i < width; i += kBlock) {
      const V a = Simd::mul(Simd::mul(Simd::load(x + i), inverse), Simd::load(weight + i));
      const V c = Simd::mul(Simd::mul(Simd::load(x + i + 16), inverse), Simd::load(weight + i + 16));
      put_block(out, r, i / kBlock, a, c);
    }
  }
}

void convert(const float* x, int rows, const Activations& out) {
  for (int r = 0; r < rows; ++r, x += out.width)
    for (int i = 0; i < out.width; i += kBlock) put_block(out, r, i / kBlock, Simd::load(x + i), Simd::load(x + i + 16));
}

// -- packing -----------------------------------------------------------------------------------------------------------

// How many of the borders between kLevels lie below each lane, and the level that is nearest to it.
inline I nearest_index(V x) {
  I index = Simd::seti(0);
  for (int i = 0; i < 15; ++i) {
    const auto above = Simd::less(Simd::set1(0.5f * float(kLevels[i] + kLevels[i + 1])), x);
    index = Simd::addi(index, Simd::select_i(above, Simd::seti(1), Simd::seti(0)));
  }
  return index;
}
inline V nearest_level(V x) {
  V level = Simd::set1(kLevels[0]);
  for (int i = 0; i < 15; ++i) {
    const auto above = Simd::less(Simd::set1(0.5f * float(kLevels[i] + kLevels[i + 1])), x);
    level = Simd::add(level, Simd::select(above, Simd::set1(float(kLevels[i + 1] - kLevels[i])), Simd::zero()));
  }
  return level;
}

// Some scales are tried: the levels that the weights go to under each, then the scale that fits these levels best. The one
// with the least squared error is kept, errors weighed by the importance of the inputs (null: all alike).
inline float scale_int4(V first, V second, const float* importance) {
  const V one = Simd::set1(1.0f);
  const V heavy = importance ? Simd::load(importance) : one, heavy_second = importance ? Simd::load(importance + 16) : one;
  const float most = Simd::max_lanes(Simd::max(first, second));
  const float least = -Simd::max_lanes(Simd::max(Simd::sub(Simd::zero(), first), Simd::sub(Simd::zero(), second)));
  const float largest = -least > most ? least : most;
  float best = 0.0f, most_explained = 0.0f;   // of the sum of squares
  for (float factor : {0.85f, 0.95f, 1.05f}) {
    const V inverse = Simd::set1(-127.0f / (largest * factor));
    const V a = nearest_level(Simd::mul(first, inverse)), c = nearest_level(Simd::mul(second, inverse));
    const V weighed = Simd::mul(heavy, a), weighed_second = Simd::mul(heavy_second, c);
    const float product = Simd::sum_lanes(Simd::fma(first, weighed, Simd::mul(second, weighed_second)));
    const float square = Simd::sum_lanes(Simd::fma(a, weighed, Simd::mul(c, weighed_second)));   // no level is 0
    const float explained = product / square * product;
    if (explained > most_explained) best = product / square, most_explained = explained;
  }
  return best;
}

inline void pack_block_int4(const Matrix& out, uint8_t* panel, int b, int l, V first, V second, const float* importance) {
  const float wanted = scale_int4(first, second, importance ? importance + b * kBlock : nullptr);
  const uint16_t half = float_to_half(std::max(-65504.0f, std::min(wanted, 65504.0f)));
  reinterpret_cast<uint16_t*>(panel)[b * kPanel + l] = half;
  const float scale = half_to_float(half);
  const V inverse = Simd::set1(scale != 0.0f ? 1.0f / scale : 0.0f);
  const I low = nearest_index(Simd::mul(first, inverse)), high = nearest_index(Simd::mul(second, inverse));
  int32_t bytes[kBlock / 2];
  Simd::storei(bytes, Simd::bit_or(low, Simd::shift_left(high, 4)));
  uint8_t* weights = panel + out.scale_bytes() + size_t(b) * kBlock * kPanel / 2;
  for (int i = 0; i < kBlock / 2; ++i) weights[(i / 4) * 64 + l * 4 + i % 4] = uint8_t(bytes[i]);
}

bool pack_panel(const Matrix& out, const Source& source, int p) {
  const Format format = out.format_of(p);
  const Stored stored = source.stored;
  uint8_t* panel = out.panel(p);
  V nothing = Simd::zero();   // stays so, as long as all weights are finite
  for (int l = 0; l < kPanel; ++l) {
    const int output = p * kPanel + l;
    const void* row = output < out.outputs ? source.rows[output].data : nullptr;
    float block[kBlock];
    for (int b = 0; b < out.inputs / kBlock; ++b) {
      const V first = row ? load_stored(row, stored, b * kBlock) : Simd::zero();
      const V second = row ? load_stored(row, stored, b * kBlock + 16) : Simd::zero();
      nothing = Simd::add(nothing, Simd::add(Simd::sub(first, first), Simd::sub(second, second)));
      if (format == Format::kInt4) {
        pack_block_int4(out, panel, b, l, first, second, source.importance);
      } else if (format == Format::kInt8) {
        const float largest = Simd::max_lanes(Simd::max(Simd::abs(first), Simd::abs(second)));
        const uint16_t half = float_to_half(std::min(largest / 127.0f, 65504.0f));
        reinterpret_cast<uint16_t*>(panel)[b * kPanel + l] = half;
        const float scale = half_to_float(half);
        // The scale is rounded first, so a weight may come to 127.06: it is cut to what a byte holds.
        const V inverse = Simd::set1(scale > 0.0f ? 1.0f / scale : 0.0f), most = Simd::set1(127.0f);
        const V least = Simd::set1(-127.0f);
        int8_t values[kBlock];
        Simd::store_i8(values, Simd::to_int(Simd::min(Simd::max(Simd::mul(first, inverse), least), most)));
        Simd::store_i8(values + 16, Simd::to_int(Simd::min(Simd::max(Simd::mul(second, inverse), least), most)));
        uint8_t* weights = panel + out.scale_bytes() + size_t(b) * kBlock * kPanel;
        for (int i = 0; i < kBlock; ++i)
          weights[(i / 4) * 64 + l * 4 + i % 4] = uint8_t(values[i] + Simd::kWeightOffset);
      } else if (format == Format::kBf16) {
        uint16_t values[kBlock];
        Simd::store_bf16(values, first);
        Simd::store_bf16(values + 16, second);
        uint16_t* weights = reinterpret_cast<uint16_t*>(panel) + size_t(b) * kBlock * kPanel;
        for (int i = 0; i < kBlock; ++i) weights[(i / 2) * 32 + l * 2 + i % 2] = values[i];
      } else {
        Simd::store(block, first);
        Simd::store(block + 16, second);
        float* weights = reinterpret_cast<float*>(panel) + size_t(b) * kBlock * kPanel;
        for (int i = 0; i < kBlock; ++i) weights[i * kPanel + l] = block[i];
      }
    }
  }
  return Simd::sum_lanes(nothing) == 0.0f;
}

bool pack(const Matrix& out, const Source& source, int begin, int end) {
  bool finite = true;
  for (int p = begin; p < end; ++p) finite = pack_panel(out, source, p) && finite;
  return finite;
}

void unpack(const Matrix& in, int output, float* row) {
  const Format format = in.format_of(output / kPanel);
  const uint8_t* panel = in.panel(output / kPanel);
  const int l = output % kPanel;
  for (int i = 0; i < in.inputs; ++i) {
    const int b = i / kBlock, k = i % kBlock;
    if (format == Format::kInt4) {
      const uint8_t byte = panel[in.scale_bytes() + size_t(b) * kBlock * kPanel / 2 + (k % 16 / 4) * 64 + l * 4 + k % 4];
      const float scale = half_to_float(reinterpret_cast<const uint16_t*>(panel)[b * kPanel + l]);
      row[i] = scale * float(kLevels[k < 16 ? byte & 15 : byte >> 4]);
    } else if (format == Format::kInt8) {
      const uint8_t byte = panel[in.scale_bytes() + size_t(b) * kBlock * kPanel + (k / 4) * 64 + l * 4 + k % 4];
      const float scale = half_to_float(reinterpret_cast<const uint16_t*>(panel)[b * kPanel + l]);
      row[i] = scale * float(int8_t(byte - Simd::kWeightOffset));
    } else if (format == Format::kBf16) {
      const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t*>(panel)[(i / 2) * 32 + l * 2 + i % 2]) << 16;
      std::memcpy(&row[i], &bits, 4);
    } else {
      row[i] = reinterpret_cast<const float*>(panel)[i * kPanel + l];
    }
  }
}

// -- matrix times rows -------------------------------------------------------------------------------------------------

// Micro-kernels: R rows with one panel, sum[r] of sixteen outputs each. A sum is made in the same order whatever R is;
// it is made of several chains, because one chain of additions would wait for each of them. (Within a block of int8 the
// sum is of integers, so there the number of chains does not matter.)
//
// Meanwhile the weights that come next are asked for, evenly over all row groups of a panel: so memory is as busy
// while a panel is used again from the cache as it is while it is read. A processor follows what is read within a page (of
// 4096 bytes, whatever pages the system has) and no further, so that one stream of reading does not fill the way to memory: it
// is asked from several pages by turns. Reading a window of them asks for the next window.
constexpr uintptr_t kStreams = 4, kPage = 4096, kWindow = kStreams * kPage, kTurn = kStreams * 64;

struct Ahead {
  uintptr_t from;              // what this row group stands for of the panel that is read, in turns
  int turns;                   // for each block of 32 inputs
  const uint8_t *end, *then;   // at `then` is what is read behind `end`
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

inline void ask(const Ahead& ahead, int block) { ask_turns(ahead, block * ahead.turns, ahead.turns); }

// The integer sums of a block, chains put together, times the scales of weights and rows.
template <int R, int C>
inline void add_scaled(I (&dot)[R][C], V weight_scale, const float* scales, V (&sum)[R]) {
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) {
    PPSD_UNROLL
    for (int c = 1; c < C; ++c) dot[i][0] = Simd::addi(dot[i][0], dot[i][c]);
    sum[i] = Simd::fma(Simd::to_float(dot[i][0]), Simd::mul(weight_scale, Simd::set1(scales[i])), sum[i]);
  }
}

template <int R>
inline void dot_int8(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  constexpr int kChains = R == 1 ? 4 : R <= 3 ? 2 : 1;
  const uint16_t* weight_scales = reinterpret_cast<const uint16_t*>(w.panel(p));
  const uint8_t* weights = w.panel(p) + w.scale_bytes();
  const uint32_t* x = in.words + r;
  const float* scales = in.scales + r;
  const int32_t* corrections = in.corrections + r;
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b) {
    ask(ahead, b);
    I dot[R][kChains];
    PPSD_UNROLL
    for (int i = 0; i < R; ++i)
      PPSD_UNROLL
      for (int c = 0; c < kChains; ++c) dot[i][c] = Simd::seti(c == 0 ? corrections[i] : 0);
    for (int g = 0; g < kBlock / 4; g += kChains)
      PPSD_UNROLL
      for (int c = 0; c < kChains; ++c, x += in.rows, weights += 4 * kPanel)
        PPSD_UNROLL
        for (int i = 0; i < R; ++i) dot[i][c] = Simd::dot4(dot[i][c], Simd::bytes(weights), Simd::four(x + i));
    add_scaled(dot, Simd::load_f16(weight_scales), scales, sum);
    weight_scales += kPanel;
    scales += in.rows;
    corrections += in.rows;
  }
}

// As dot_int8: the halves of 64 bytes are two words of int8 once the levels are looked up.
template <int R>
inline void dot_int4(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  constexpr int kChains = R <= 3 ? 2 : 1;
  const uint16_t* weight_scales = reinterpret_cast<const uint16_t*>(w.panel(p));
  const uint8_t* weights = w.panel(p) + w.scale_bytes();
  const uint32_t* x = in.words + r;
  const size_t high = size_t(kBlock / 8) * in.rows;   // from the word that meets the low halves to that of the high ones
  const float* scales = in.scales + r;
  const int32_t* corrections = in.corrections + r;
  const Simd::Levels levels = Simd::levels(kLevels);
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b, x += high) {
    ask(ahead, b);
    I dot[R][kChains];
    PPSD_UNROLL
    for (int i = 0; i < R; ++i)
      PPSD_UNROLL
      for (int c = 0; c < kChains; ++c) dot[i][c] = Simd::seti(c == 0 ? corrections[i] : 0);
    PPSD_UNROLL
    for (int g = 0; g < kBlock / 8; ++g, x += in.rows, weights += 4 * kPanel) {
      const auto halves = Simd::halves(weights, levels);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) dot[i][0] = Simd::dot4(dot[i][0], halves.low, Simd::four(x + i));
      PPSD_UNROLL
      for (int i = 0; i < R; ++i)
        dot[i][kChains - 1] = Simd::dot4(dot[i][kChains - 1], halves.high, Simd::four(x + high + i));
    }
    add_scaled(dot, Simd::load_f16(weight_scales), scales, sum);
    weight_scales += kPanel;
    scales += in.rows;
    corrections += in.rows;
  }
}

// Even and odd pairs of a row are added in chains of their own.
template <int R>
inline void dot_bf16(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(w.panel(p));
  const uint32_t* x = in.words + r;
  const size_t pair = size_t(in.rows) * Simd::kBf16Words;
  V odd[R];
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = odd[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b) {
    ask(ahead, b);
    for (int k = 0; k < kBlock; k += 4, weights += 4 * kPanel, x += 2 * pair) {
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) sum[i] = Simd::dot2(sum[i], weights, x + i, in.rows);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) odd[i] = Simd::dot2(odd[i], weights + 2 * kPanel, x + pair + i, in.rows);
    }
  }
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::add(sum[i], odd[i]);
}

template <int R>
inline void dot_fp32(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  const float* weights = reinterpret_cast<const float*>(w.panel(p));
  const float* x = reinterpret_cast<const float*>(in.words) + r;
  V odd[R];
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = odd[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b) {
    ask(ahead, b);
    for (int k = 0; k < kBlock; k += 2, weights += 2 * kPanel, x += 2 * in.rows) {
      const V even_weights = Simd::load(weights), odd_weights = Simd::load(weights + kPanel);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) sum[i] = Simd::fma(even_weights, Simd::set1(x[i]), sum[i]);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) odd[i] = Simd::fma(odd_weights, Simd::set1(x[in.rows + i]), odd[i]);
    }
  }
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::add(sum[i], odd[i]);
}

template <Format F, int R, class Use>
inline void dot_and_use(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, Use&& use) {
  V sum[R];
  if constexpr (F == Format::kInt8) dot_int8<R>(w, p, in, r, ahead, sum);
  else if constexpr (F == Format::kInt4) dot_int4<R>(w, p, in, r, ahead, sum);
  else if constexpr (F == Format::kBf16) dot_bf16<R>(w, p, in, r, ahead, sum);
  else dot_fp32<R>(w, p, in, r, ahead, sum);
  for (int i = 0; i < R; ++i) use(r + i, p, sum[i]);
}

// The last rows, fewer than Most of them.
template <Format F, int Most, class Use>
inline void few_rows(const Matrix& w, int p, const Activations& in, int r, int rows, const Ahead& ahead, Use&& use) {
  if constexpr (Most > 1) {
    if (rows == Most - 1) dot_and_use<F, Most - 1>(w, p, in, r, ahead, use);
    else few_rows<F, Most - 1>(w, p, in, r, rows, ahead, use);
  }
}

}  // namespace
}  // namespace ppsd

#if defined(PPSD_AMX)
#include "tiles.h"
#endif

namespace ppsd {
namespace {

bool row_major([[maybe_unused]] Format activations) {
#if defined(PPSD_AMX)
  return activations == Format::kBf16;
#else
  return false;
#endif
}

template <Format F, class Use>
inline void multiply_as(const Matrix& w, const Activations& in, const ReadThen& next, int begin, int end, Use&& use) {
#if defined(PPSD_AMX)
  if constexpr (F == Format::kBf16) return multiply_in_tiles(w, in, next, begin, end, use);
#endif
  constexpr int kMost = Simd::kRows;
  const int groups = (in.rows + kMost - 1) / kMost, blocks = w.inputs / kBlock;
  const size_t share = w.panel_bytes(F) / groups;
  const bool leads_on = next.then && begin < next.end;
  const uint8_t* const stop = w.panel(leads_on ? next.end : w.panels());
  for (int p = begin; p < end; ++p) {
    uintptr_t from = reinterpret_cast<uintptr_t>(w.panel(p));
    const auto ahead = [&] {
      const uintptr_t begin = from & ~(kTurn - 1), end = (from += share) & ~(kTurn - 1);
      const int turns = int((end - begin) / kTurn), each = turns / blocks;
      const Ahead ahead{begin, each, stop, leads_on ? next.then : stop};
      ask_turns(ahead, each * blocks, turns - each * blocks);
      return ahead;
    };
    int r = 0;
    for (; in.rows - r >= kMost; r += kMost) dot_and_use<F, kMost>(w, p, in, r, ahead(), use);
    few_rows<F, kMost>(w, p, in, r, in.rows - r, ahead(), use);
  }
}

// use(row, panel, sixteen outputs) for all rows and the panels [begin, end), weights read once.
template <class Use>
inline void multiply(const Matrix& w, const Activations& in, const ReadThen& next, int begin, int end, Use&& use) {
  switch (w.format) {
    case Format::kInt8: return multiply_as<Format::kInt8>(w, in, next, begin, end, use);
    case Format::kInt4: {
      const int wide = std::clamp(w.wide_from, begin, end);
      multiply_as<Format::kInt4>(w, in, next, begin, wide, use);
      return multiply_as<Format::kInt8>(w, in, next, wide, end, use);
    }
    case Format::kBf16: return multiply_as<Format::kBf16>(w, in, next, begin, end, use);
    case Format::kFp32: return multiply_as<Format::kFp32>(w, in, next, begin, end, use);
  }
}

}  // namespace
}  // namespace ppsd

#include "cache_int8.h"

namespace ppsd {
namespace {

// -- phases of a layer -------------------------------------------------------------------------------------------------

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

// Of a key or a value of a sibling, apart.
inline size_t row_bytes(Stored stored, int head_dim) {
  if (stored == Stored::kInt8) return KvCache::panel_bytes(head_dim) / kPanel;
  return size_t(head_dim) * (stored == Stored::kFp32 ? 4 : 2);
}

inline void put_aside(uint8_t* slot, Stored stored, int channel, V x) {
  if (stored == Stored::kFp32) Simd::store(reinterpret_cast<float*>(slot) + channel, x);
  else Simd::store_bf16(reinterpret_cast<uint16_t*>(slot) + channel, x);
}

// Where the keys and values of a pass go. An int8 cache takes two panels of outputs together, a block: the first one waits.
struct Keep {
  const QkvPhase& phase;
  const int of_text;
  V waiting[kPassRows];

  explicit Keep(const QkvPhase& p) : phase(p), of_text(p.rows - (p.siblings ? p.siblings->rows : 0)) {}

  int position(int r) const {
    if (phase.positions) return phase.positions[r];
    return r < of_text ? phase.start + r : phase.siblings->positions[r - of_text];
  }
  void put(bool value, int r, int kv_head, int channel, V x) {
    const KvCache& cache = phase.cache[phase.positions ? r : 0];
    uint8_t* aside = nullptr;
    if (r >= of_text) {
      const size_t slot = size_t(position(r) % kSiblings) * cache.kv_heads + kv_head;
      aside = (value ? phase.siblings->values : phase.siblings->keys) + slot * row_bytes(cache.stored, cache.head_dim);
    }
    if (cache.stored != Stored::kInt8) {
      if (aside) put_aside(aside, cache.stored, channel, x);
      else if (value) put_value(cache, kv_head, position(r), channel, x);
      else put_key(cache, kv_head, position(r), channel, x);
    } else if (channel % kBlock == 0) {
      waiting[r] = x;
    } else {
      const Bytes bytes = to_bytes(waiting[r], x);
      channel -= kPanel;
      if (aside) put_aside_bytes(aside, cache.head_dim, channel, bytes);
      else if (value) put_value_bytes(cache, kv_head, position(r), channel, bytes);
      else put_key_bytes(cache, kv_head, position(r), channel, bytes);
    }
  }
};

void qkv(const QkvPhase& phase, int begin, int end) {
  const KvCache& shape = *phase.cache;
  const int head_dim = shape.head_dim, panels_per_head = head_dim / kPanel;
  const V scale = Simd::set1(1.0f / std::sqrt(float(head_dim)));
  Keep keep(phase);
  multiply(*phase.weights, *phase.input, phase.next, begin, end, [&](int r, int p, V y) {
    if (phase.bias) y = Simd::add(y, Simd::load(phase.bias + p * kPanel));
    const int head = p / panels_per_head, channel = p % panels_per_head * kPanel;
    if (const int kv_head = head - phase.heads - shape.kv_heads; kv_head >= 0) return keep.put(true, r, kv_head, channel, y);
    const float* rope = phase.rope + (size_t(keep.position(r)) * head_dim + channel) * 2;
    y = Simd::fma(Simd::swap_halves(y), Simd::load(rope + kPanel), Simd::mul(y, Simd::load(rope)));
    if (const int kv_head = head - phase.heads; kv_head >= 0) return keep.put(false, r, kv_head, channel, y);
    Simd::store(phase.queries + (size_t(r) * phase.heads + head) * head_dim + channel, Simd::mul(y, scale));
  });
}

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
  const uint8_t *key, *value;    // null; or of a sibling, to be taken at its position for what the cache holds there
  const QueryBytes* bytes;       // q for a cache of int8
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

// The score of a sibling's own key: the same chain of products and sums as in `score`.
template <Stored S>
inline float score_own(const Query& query, int head_dim) {
  V sum = Simd::zero();
  for (int c = 0; c < head_dim; c += kPanel) {
    float k[kPanel];
    Simd::store(k, load_cached<S>(query.key, c));
    for (int l = 0; l < kPanel; ++l) sum = Simd::fma(Simd::set1(k[l]), Simd::set1(query.q[c + l]), sum);
  }
  float scores[kPanel];
  Simd::store(scores, sum);
  return scores[0];
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

#include "attention_int8.h"

namespace ppsd {
namespace {

// Q queries of one KV head over one span of positions. Queries that the span lies behind of are not passed in, so every
// query sees the same spans in the same order, whatever other queries it shares them with. (What lies behind the last of
// them is left out, or weighs exactly nothing.)
template <int Q, Stored S>
void attend_span(const KvCache& cache, int kv_head, int span, Query* queries, ReadAhead* ahead) {
  constexpr int J = panels_together(Q);
  const int head_dim = cache.head_dim, first = span * kSpan;
  const size_t at = (size_t(kv_head) * cache.capacity + first) * head_dim;   // of the span's keys, and of its values
  const int count = std::min(queries[Q - 1].position - first + 1, kSpan);
  alignas(64) float weights[Q][kSpan];
  for (int j = 0; j * kPanel < count; j += J) score<Q, J, S>(cache, at, j, queries, ahead, weights);
  const auto own = [&](int i) { return queries[i].key != nullptr && queries[i].position < first + kSpan; };
  for (int i = 0; i < Q; ++i)
    if (own(i)) weights[i][queries[i].position - first] = score_own<S>(queries[i], head_dim);

  float shrink[16] = {};
  soften<Q>(queries, first, count, [](V x) { return exp(x); }, weights, shrink);

  // A sibling's own value comes last of all that it sees, as it would from the cache.
  float own_weights[Q] = {};
  for (int i = 0; i < Q; ++i)
    if (own(i)) own_weights[i] = std::exchange(weights[i][queries[i].position - first], 0.0f);

  int c = 0;
  for (; c + J * kPanel <= head_dim; c += J * kPanel) mix<Q, J, S>(cache, at, count, c, queries, ahead, weights, shrink);
  for (; c < head_dim; c += kPanel) mix<Q, 1, S>(cache, at, count, c, queries, ahead, weights, shrink);
  for (int i = 0; i < Q; ++i)
    for (c = 0; own(i) && c < head_dim; c += kPanel) {
      const V v = load_cached<S>(queries[i].value, c);
      Simd::store(queries[i].mixed + c, Simd::fma(v, Simd::set1(own_weights[i]), Simd::load(queries[i].mixed + c)));
    }
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
  const Siblings* siblings = phase.siblings;
  const int of_text = phase.rows - (siblings ? siblings->rows : 0);
  Query queries[kAttendTogether];
  [[maybe_unused]] QueryBytes bytes[S == Stored::kInt8 ? kAttendTogether : 1];
  for (int i = 0; i < count; ++i) {
    const int place = (begin + i) / group, row = siblings ? siblings->order[place] : place;
    const int head = kv_head * group + (begin + i) % group;
    const size_t at = (size_t(row) * phase.heads + head) * head_dim;
    queries[i] = {phase.queries + at, phase.mixed + at, phase.start + row, -kInfinity, 0.0f, nullptr, nullptr, nullptr};
    if constexpr (S == Stored::kInt8) {
      make_query(queries[i].q, head_dim, &bytes[i]);
      queries[i].bytes = &bytes[i];
    }
    if (row >= of_text) {
      const int position = siblings->positions[row - of_text];
      const size_t slot = (size_t(position % kSiblings) * cache.kv_heads + kv_head) * row_bytes(S, head_dim);
      queries[i].position = position;
      queries[i].key = siblings->keys + slot;
      queries[i].value = siblings->values + slot;
    }
    std::fill(queries[i].mixed, queries[i].mixed + head_dim, 0.0f);
  }
  // Queries are in order of their positions, so those that a span concerns are the last ones.
  for (int span = 0, from = 0; span <= queries[count - 1].position / kSpan; ++span) {
    while (queries[from].position < span * kSpan) ++from;
    attend_some<kAttendTogether, S>(cache, kv_head, span, queries + from, count - from, ahead);
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
             [&](int r, int p, V y) { Simd::store(waiting[r] + p % 4 * kPanel, y); });
    for (int r = 0; r < phase.rows; ++r) {
      const float* w = waiting[r];
      const V a = Simd::mul(silu(Simd::load(w)), Simd::load(w + 16));
      const V c = Simd::mul(silu(Simd::load(w + 32)), Simd::load(w + 48));
      put_block(*phase.output, r, unit, a, c);
    }
  }
}

// -- LM head -----------------------------------------------------------------------------------------------------------

inline V penalise(const LogitsPhase& phase, int position, const int32_t* ids, V y) {
  int32_t seen_at[16];
  for (int l = 0; l < 16; ++l) seen_at[l] = phase.first_seen[ids[l]];
  const auto seen = Simd::less_i(Simd::loadi(seen_at), Simd::seti(position));
  if (!Simd::any(seen)) return y;
  const V penalty = Simd::set1(phase.repetition_penalty);
  const V lower = Simd::select(Simd::less(y, Simd::zero()), Simd::mul(y, penalty), Simd::div(y, penalty));
  return Simd::select(seen, lower, y);
}

inline void store_scores(const LogitsPhase& phase, int r, int index, int count, V y) {
  float* out = phase.logits + size_t(r) * phase.weights->outputs + index;
  if (count == kPanel) return Simd::store(out, y);
  float scores[16];
  Simd::store(scores, y);
  std::copy(scores, scores + count, out);
}

inline void choose_top(V scores, const int32_t* ids, int count, int most, std::vector<Candidate>* top) {
  if (int(top->size()) >= most && !Simd::any(Simd::less(Simd::set1(top->front().score), scores))) return;
  float some[16];
  Simd::store(some, scores);
  for (int l = 0; l < count; ++l) keep_best(top, most, {some[l], ids[l]});
}

void logits(const LogitsPhase& phase, int begin, int end) {
  const int outputs = phase.weights->outputs;
  Noise noise[kPassRows];
  for (int r = 0; r < phase.rows && phase.choice == Choice::kBest; ++r)
    noise[r] = Noise(phase.each ? phase.each[r].seed : phase.seed, phase.positions[r]);
  multiply(*phase.weights, *phase.input, {}, begin, end, [&](int r, int p, V y) {
    const int index = p * kPanel, count = std::min(kPanel, outputs - index);
    if (phase.choice == Choice::kStore) return store_scores(phase, r, index, count, y);
    // Few panels hold anything new: most are done after one comparison.
    const float inverse_temperature = phase.each ? phase.each[r].inverse_temperature : phase.inverse_temperature;
    const auto beaten = [&] { return phase.choice == Choice::kBest && !may_win(y, inverse_temperature, phase.best[r]); };
    if (!phase.first_seen && beaten()) return;
    int32_t ids[16];
    for (int l = 0; l < 16; ++l) {
      const int i = std::min(index + l, outputs - 1);
      ids[l] = phase.draft_ids ? phase.draft_ids[i] : i;
    }
    if (phase.first_seen) y = penalise(phase, phase.positions[r], ids, y);
    if (phase.first_seen && beaten()) return;
    if (phase.choice == Choice::kTop) choose_top(y, ids, count, phase.top_k, &phase.top[r]);
    else if (inverse_temperature == 0.0f) choose_best(y, ids, count, &phase.best[r]);
    else choose_noisy(y, inverse_temperature, noise[r], ids, count, &phase.best[r]);
  });
}

void soft_sum(const float* x, int n, float scale, float* max, float* sum) {
  const int whole = n / 16 * 16;
  float rest[16];
  std::fill(rest, rest + 16, -kInfinity);
  std::copy(x + whole, x + n, rest);
  V largest = Simd::load(rest);
  for (int i = 0; i < whole; i += 16) largest = Simd::max(largest, Simd::load(x + i));
  *max = Simd::max_lanes(largest);
  const V top = Simd::set1(*max), factor = Simd::set1(scale);
  V total = exp(Simd::mul(Simd::sub(Simd::load(rest), top), factor));
  for (int i = 0; i < whole; i += 16)
    total = Simd::add(total, exp(Simd::mul(Simd::sub(Simd::load(x + i), top), factor)));
  *sum = Simd::sum_lanes(total);
}

void gumbel(uint64_t seed, int position, const int* ids, int n, float* out) {
  const Noise at(seed, position);
  for (int i = 0; i < n; i += 16) {
    int32_t some[16];
    float noise[16];
    for (int l = 0; l < 16; ++l) some[l] = ids[std::min(i + l, n - 1)];
    Simd::store(noise, gumbel_noise(uniform(at.words(Simd::loadi(some)))));
    std::copy(noise, noise + std::min(16, n - i), out + i);
  }
}

Candidate choose(const float* scores, const int* ids, int n, float inverse_temperature, uint64_t seed, int position) {
  const Noise noise(seed, position);
  Candidate best = kNoCandidate;
  for (int i = 0; i < n; i += 16) {
    float some_scores[16];
    int32_t some[16];
    for (int l = 0; l < 16; ++l) {
      const int at = std::min(i + l, n - 1);
      some_scores[l] = scores[at];
      some[l] = ids ? ids[at] : at;
    }
    const V y = Simd::load(some_scores);
    if (may_win(y, inverse_temperature, best)) choose_noisy(y, inverse_temperature, noise, some, std::min(16, n - i), &best);
  }
  return best;
}

uint64_t stream(const uint8_t* data, size_t bytes) {
  I sum[16];
  for (I& s : sum) s = Simd::seti(0);
  const auto take = [&](I& into, size_t at) {
    into = Simd::bit_xor(into, Simd::loadi(reinterpret_cast<const int32_t*>(data + at)));
  };
  size_t from = 0;   // windows of pages by turns, and the rest one line after the other
  for (; from + kWindow <= bytes; from += kWindow)
    for (size_t at = 0; at < kPage; at += 64)
      for (size_t page = 0; page < kStreams; ++page) take(sum[at / 64 % 2 * kStreams + page], from + page * kPage + at);
  for (; from < bytes; from += 64) take(sum[from / 64 % 16], from);
  for (int i = 1; i < 16; ++i) sum[0] = Simd::bit_xor(sum[0], sum[i]);
  return uint64_t(Simd::sum_lanes(sum[0]));
}

Kernels table(const char* name) {
  return {name, Simd::kWeightOffset, Simd::kBf16Words, row_major, pack, unpack, normalize, convert,
          qkv, attend, add, swiglu, logits, soft_sum, gumbel, choose, stream};
}

}  // namespace
}  // namespace ppsd
