// Sixteen lanes in plain C++, for any machine; compilers turn the loops into what the machine has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "../half.h"

namespace ppsd {
namespace {

struct Simd {
  struct V {
    float x[16];
  };
  struct I {
    int32_t x[16];
  };
  struct M {
    bool x[16];
  };

  static constexpr int kWeightOffset = 0;
  static constexpr int kRows = 2;             // rows of a micro-kernel
  static constexpr int kSums = 6;             // sums beside each other in attention

  template <class F>
  static V each(F f) {
    V out;
    for (int l = 0; l < 16; ++l) out.x[l] = f(l);
    return out;
  }
  template <class F>
  static I each_i(F f) {
    I out;
    for (int l = 0; l < 16; ++l) out.x[l] = f(l);
    return out;
  }
  template <class F>
  static M each_m(F f) {
    M out;
    for (int l = 0; l < 16; ++l) out.x[l] = f(l);
    return out;
  }

  static V zero() { return set1(0.0f); }
  static V set1(float x) {
    return each([&](int) { return x; });
  }
  static V load(const float* p) {
    return each([&](int l) { return p[l]; });
  }
  static void store(float* p, V v) { std::memcpy(p, v.x, sizeof v.x); }
  static V add(V a, V b) {
    return each([&](int l) { return a.x[l] + b.x[l]; });
  }
  static V sub(V a, V b) {
    return each([&](int l) { return a.x[l] - b.x[l]; });
  }
  static V mul(V a, V b) {
    return each([&](int l) { return a.x[l] * b.x[l]; });
  }
  static V div(V a, V b) {
    return each([&](int l) { return a.x[l] / b.x[l]; });
  }
  static V max(V a, V b) {
    return each([&](int l) { return a.x[l] > b.x[l] ? a.x[l] : b.x[l]; });
  }
  static V min(V a, V b) {
    return each([&](int l) { return a.x[l] < b.x[l] ? a.x[l] : b.x[l]; });
  }
  static V abs(V a) {
    return each([&](int l) { return std::fabs(a.x[l]); });
  }
  // Not fused: a machine without the instruction would call a function for every lane.
  static V fma(V a, V b, V c) {
    return each([&](int l) { return a.x[l] * b.x[l] + c.x[l]; });
  }
  static V round(V a) {
    return each([&](int l) { return std::nearbyint(a.x[l]); });
  }

  static V scale2(V a, V n) {   // a * 2^n, n a whole number from -126 to 127
    return mul(a, bits_to_float(shift_left(addi(to_int(n), seti(127)), 23)));
  }

  static I seti(int32_t x) {
    return each_i([&](int) { return x; });
  }
  static I loadi(const int32_t* p) {
    return each_i([&](int l) { return p[l]; });
  }
  static void storei(int32_t* p, I v) { std::memcpy(p, v.x, sizeof v.x); }
  static I addi(I a, I b) {
    return each_i([&](int l) { return a.x[l] + b.x[l]; });
  }
  static V to_float(I a) {
    return each([&](int l) { return float(a.x[l]); });
  }
  static I to_int(V a) {
    return each_i([&](int l) { return int32_t(std::nearbyint(a.x[l])); });
  }
  static V bits_to_float(I a) {
    V out;
    std::memcpy(out.x, a.x, sizeof out.x);
    return out;
  }
  static I float_to_bits(V a) {
    I out;
    std::memcpy(out.x, a.x, sizeof out.x);
    return out;
  }
  static I shift_left(I a, int n) {
    return each_i([&](int l) { return int32_t(uint32_t(a.x[l]) << n); });
  }
  static I shift_right(I a, int n) {
    return each_i([&](int l) { return int32_t(uint32_t(a.x[l]) >> n); });
  }
  static I bit_and(I a, I b) {
    return each_i([&](int l) { return a.x[l] & b.x[l]; });
  }
  static I bit_or(I a, I b) {
    return each_i([&](int l) { return a.x[l] | b.x[l]; });
  }

  static I bit_xor(I a, I b) {
    return each_i([&](int l) { return a.x[l] ^ b.x[l]; });
  }
  static void mul_wide(I a, uint32_t m, I* high, I* low) {
    for (int l = 0; l < 16; ++l) {
      const uint64_t product = uint64_t(uint32_t(a.x[l])) * m;
      high->x[l] = int32_t(product >> 32);
      low->x[l] = int32_t(uint32_t(product));
    }
  }
  static V unsigned_to_float(I a) {
    return each([&](int l) { return float(uint32_t(a.x[l])); });
  }

  static M less(V a, V b) {
    return each_m([&](int l) { return a.x[l] < b.x[l]; });
  }
  static M less_i(I a, I b) {
    return each_m([&](int l) { return a.x[l] < b.x[l]; });
  }
  static V select(M m, V yes, V no) {
    return each([&](int l) { return m.x[l] ? yes.x[l] : no.x[l]; });
  }
  static I select_i(M m, I yes, I no) {
    return each_i([&](int l) { return m.x[l] ? yes.x[l] : no.x[l]; });
  }
  static bool any(M m) {
    bool found = false;
    for (bool x : m.x) found |= x;
    return found;
  }

  static V load_f16(const uint16_t* p) {
    return each([&](int l) { return half_to_float(p[l]); });
  }
  static V load_bf16(const uint16_t* p) {
    return each([&](int l) { return bf16_to_float(p[l]); });
  }
  static V load_i8(const uint8_t* p) {
    return each([&](int l) { return float(int8_t(p[l])); });
  }
  static void store_bf16(uint16_t* p, V v) {
    for (int l = 0; l < 16; ++l) p[l] = float_to_bf16(v.x[l]);
  }
  static void store_i8(int8_t* p, I v) {
    for (int l = 0; l < 16; ++l) p[l] = int8_t(v.x[l] < -128 ? -128 : v.x[l] > 127 ? 127 : v.x[l]);
  }

  static void store_u8(uint8_t* p, I v) {   // of 0 to 255
    for (int l = 0; l < 16; ++l) p[l] = uint8_t(v.x[l]);
  }

  // All lanes put together; floats are added in the same tree everywhere: lane l + 8 to lane l, then l + 4, l + 2, l + 1.
  static float sum_lanes(V v) {
    for (int width = 8; width > 0; width /= 2)
      for (int l = 0; l < width; ++l) v.x[l] += v.x[l + width];
    return v.x[0];
  }
  static float max_lanes(V v) { return *std::max_element(v.x, v.x + 16); }
  static int32_t sum_lanes(I v) { return std::accumulate(v.x, v.x + 16, int32_t(0)); }

  static V swap_halves(V v) {
    return each([&](int l) { return v.x[l ^ 8]; });
  }

  static const int8_t* four(const uint32_t* word) { return reinterpret_cast<const int8_t*>(word); }
  static void prefetch(const void*) {}
  static void prefetch_far(const void*) {}
  // Weights [16][4]: as int8, or the codes of int4's low and high halves.
  struct Codes {
    int8_t low[64], high[64];
  };
  static const int8_t* bytes(const uint8_t* weights) { return reinterpret_cast<const int8_t*>(weights); }
  static Codes codes(const uint8_t* weights) {
    Codes out;
    for (int i = 0; i < 64; ++i) {
      out.low[i] = weights[i] & 15;
      out.high[i] = weights[i] >> 4;
    }
    return out;
  }
  // The codes of int6 of 16 inputs, as words of four.
  struct Sixes {
    int8_t words[4][64];
  };
  static Sixes sixes(const uint8_t* codes) {
    Sixes out;
    for (int g = 0; g < 4; ++g)
      for (int i = 0; i < 64; ++i)
        out.words[g][i] = int8_t((codes[g / 2 * 64 + i] >> g % 2 * 4 & 15) | (codes[128 + i] >> 2 * g & 3) << 4);
    return out;
  }
  static I dot4(I acc, const int8_t* w, const int8_t* activations) {
    return each_i([&](int l) {
      int32_t sum = acc.x[l];
      for (int k = 0; k < 4; ++k) sum += int32_t(w[4 * l + k]) * activations[k];
      return sum;
    });
  }
  // The sums of a block of codes (0 to 15) times activations.
  using CodeSum = I;
  static CodeSum no_codes() { return seti(0); }
  static CodeSum dot4_codes(CodeSum acc, const int8_t* codes, const int8_t* activations) {
    return dot4(acc, codes, activations);
  }
  static CodeSum add_codes(CodeSum a, CodeSum b) { return addi(a, b); }
  static I sum_of_codes(CodeSum sum) { return sum; }
  // What the sum of 16 codes of int6 (0 to 63) begins with, so that it is one of codes less 32.
  static int32_t start_of(I values) { return -32 * sum_lanes(values); }
  static CodeSum start(int32_t of) { return seti(of); }
  // acc += four products for each lane: values (signed) with the same four shares (unsigned, kMostShare at most).
  static constexpr int kMostShare = 255;
  static I take4(I acc, const int8_t* values, const int8_t* shares) {
    return each_i([&](int l) {
      int32_t sum = acc.x[l];
      for (int k = 0; k < 4; ++k) sum += int32_t(values[4 * l + k]) * uint8_t(shares[k]);
      return sum;
    });
  }
  static constexpr int kBf16Words = 2;
  static V dot2(V acc, const uint16_t* weights, const uint32_t* two, int apart) {
    const float first = ppsd::bits_to_float(two[0]), second = ppsd::bits_to_float(two[apart]);
    return each([&](int l) {
      const float low = acc.x[l] + bf16_to_float(weights[2 * l]) * first;
      return low + bf16_to_float(weights[2 * l + 1]) * second;
    });
  }
};

}  // namespace
}  // namespace ppsd
