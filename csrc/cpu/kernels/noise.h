// The Gumbel noise of sampling (../../core/noise.h says which), and choosing by it.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../core/noise.h"
#include "vector_math.h"

namespace ppsd {
namespace {

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

}  // namespace
}  // namespace ppsd
