// Counter-based noise; tests/noise_twin.py is its twin in Python, equal to the bit.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
//   key = (seed low, seed high), counter = (token id, position, stream, 0).
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace ppsd {

enum : uint32_t { kSamplingStream = 0, kStopRuleStream = 1, kSimulationStream = 2 };

struct PhiloxKey {
  uint32_t low, high;
  explicit PhiloxKey(uint64_t seed) : low(uint32_t(seed)), high(uint32_t(seed >> 32)) {}
};

static inline std::array<uint32_t, 4> philox(PhiloxKey key, std::array<uint32_t, 4> counter) {
  auto [c0, c1, c2, c3] = counter;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ key.low;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ key.high;
    c3 = uint32_t(p0);
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// In (0, 1), float32. The word is rounded to float before scaling, so that small numbers keep all their precision.
static inline float uniform_from_word(uint32_t word) {
  const float scaled = float(word) * 0x1p-32f + 0x1p-33f;
  return scaled < 1.0f - 0x1p-24f ? scaled : 1.0f - 0x1p-24f;
}

// One number in (0, 1) for a position, whatever else was drawn: what oracles toss.
inline double coin(uint64_t seed, int position, uint32_t stream = kSimulationStream) {
  const auto words = philox(PhiloxKey(seed), {0, uint32_t(position), stream, 0});
  return (double((uint64_t(words[0]) << 20) | (words[1] >> 12)) + 0.5) * 0x1p-52;
}

// A sequence of draws for a stop rule.
class NoiseStream {
 public:
  explicit NoiseStream(uint64_t seed) : seed_(seed) {}

  double uniform() { return coin(seed_, drawn_++, kStopRuleStream); }   // in (0, 1)

  double normal() {  // Box-Muller; the second of the pair is not kept, so that draws stay countable
    const double radius = std::sqrt(-2.0 * std::log(uniform()));
    return radius * std::cos(2.0 * M_PI * uniform());
  }

  double gamma(double shape) {  // Marsaglia and Tsang, "A simple method for generating gamma variables", 2000
    if (shape < 1.0) {
      const double larger = gamma(shape + 1.0);
      return larger * std::pow(uniform(), 1.0 / shape);
    }
    const double d = shape - 1.0 / 3.0, c = 1.0 / std::sqrt(9.0 * d);
    for (;;) {
      const double x = normal();
      double v = 1.0 + c * x;
      if (v > 0.0) {
        v = v * v * v;
        if (std::log(uniform()) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
      }
    }
  }

  double beta(double a, double b) {
    const double x = gamma(a);
    return x / (x + gamma(b));
  }

 private:
  uint64_t seed_;
  int drawn_ = 0;
};

}  // namespace ppsd
