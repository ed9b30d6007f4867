// Sixteen lanes as four vectors of GCC's and Clang's extensions, for any machine. AArch64 has its own instructions where they do
// what the extensions cannot say: fused and rounding steps, conversions, sums of lanes, products of bytes (one instruction with
// Armv8.2's DotProd).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../half.h"

namespace ppsd {
namespace {

struct Simd {
  typedef float Floats __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  struct V {
    Floats q[4];
  };
  struct I {
    Ints q[4];
  };
  using M = I;   // all ones where true

  static constexpr int kWeightOffset = 0;
#if defined(__aarch64__)
  static constexpr int kRows = 4;   // rows of a micro-kernel: 16 of 32 registers, and weights are read a register at a time
#else
  static constexpr int kRows = 2;
#endif
  static constexpr int kSums = 6;   // sums beside each other in attention

  template <class T, class F>
  static T quarters(F f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
  // f of each lane, where there is nothing better: by way of memory.
  template <class T, class E, class F>
  static T lanes(F f) {
    E x[16];
    for (int l = 0; l < 16; ++l) x[l] = f(l);
    T out;
    std::memcpy(&out, x, sizeof x);
    return out;
  }
  template <class E, class T>
  static E lane(const T& v, int l) {
    return v.q[l / 4][l % 4];
  }

  static V zero() { return set1(0.0f); }
  static V set1(float x) {
    return quarters<V>([=](int) { return Floats{x, x, x, x}; });
  }
  static V load(const float* p) {
    V out;
    std::memcpy(&out, p, sizeof out);
    return out;
  }
  static void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
  static V add(V a, V b) {
    return quarters<V>([&](int i) { return a.q[i] + b.q[i]; });
  }
  static V sub(V a, V b) {
    return quarters<V>([&](int i) { return a.q[i] - b.q[i]; });
  }
  static V mul(V a, V b) {
    return quarters<V>([&](int i) { return a.q[i] * b.q[i]; });
  }
  static V div(V a, V b) {
    return quarters<V>([&](int i) { return a.q[i] / b.q[i]; });
  }
  static V max(V a, V b) { return select(less(b, a), a, b); }
  static V min(V a, V b) { return select(less(a, b), a, b); }
  static V abs(V a) { return bits_to_float(bit_and(float_to_bits(a), seti(0x7FFFFFFF))); }

  static V fma(V a, V b, V c) {
    return quarters<V>([&](int i) { return fma(a.q[i], b.q[i], c.q[i]); });
  }
  static V scale2(V a, V n) {   // a * 2^n, n a whole number from -126 to 127
    return mul(a, bits_to_float(shift_left(addi(to_int(n), seti(127)), 23)));
  }

  static I seti(int32_t x) {
    return quarters<I>([=](int) { return Ints{x, x, x, x}; });
  }
  static I loadi(const int32_t* p) {
    I out;
    std::memcpy(&out, p, sizeof out);
    return out;
  }
  static void storei(int32_t* p, I v) { std::memcpy(p, &v, sizeof v); }
  static I addi(I a, I b) {
    return quarters<I>([&](int i) { return a.q[i] + b.q[i]; });
  }
  static V to_float(I a) {
    return quarters<V>([&](int i) { return __builtin_convertvector(a.q[i], Floats); });
  }
  static V bits_to_float(I a) {
    return quarters<V>([&](int i) { return Floats(a.q[i]); });
  }
  static I float_to_bits(V a) {
    return quarters<I>([&](int i) { return Ints(a.q[i]); });
  }
  static I shift_left(I a, int n) {
    return quarters<I>([&](int i) { return Ints(Words(a.q[i]) << n); });
  }
  static I shift_right(I a, int n) {   // zeros come in from above
    return quarters<I>([&](int i) { return Ints(Words(a.q[i]) >> n); });
  }
  static I bit_and(I a, I b) {
    return quarters<I>([&](int i) { return a.q[i] & b.q[i]; });
  }
  static I bit_or(I a, I b) {
    return quarters<I>([&](int i) { return a.q[i] | b.q[i]; });
  }
  static I bit_xor(I a, I b) {
    return quarters<I>([&](int i) { return a.q[i] ^ b.q[i]; });
  }
  static void mul_wide(I a, uint32_t m, I* high, I* low) {
    for (int i = 0; i < 4; ++i)
      for (int l = 0; l < 4; ++l) {
        const uint64_t product = uint64_t(uint32_t(a.q[i][l])) * m;
        high->q[i][l] = int32_t(product >> 32);
        low->q[i][l] = int32_t(uint32_t(product));
      }
  }
  static V unsigned_to_float(I a) {
    return quarters<V>([&](int i) { return __builtin_convertvector(Words(a.q[i]), Floats); });
  }

  static M less(V a, V b) {
    return quarters<M>([&](int i) { return Ints(a.q[i] < b.q[i]); });
  }
  static M less_i(I a, I b) {
    return quarters<M>([&](int i) { return Ints(a.q[i] < b.q[i]); });
  }
  static V select(M m, V yes, V no) { return bits_to_float(select_i(m, float_to_bits(yes), float_to_bits(no))); }
  static I select_i(M m, I yes, I no) {
    return quarters<I>([&](int i) { return (m.q[i] & yes.q[i]) | (~m.q[i] & no.q[i]); });
  }
  static bool any(M m) {
    const Ints found = m.q[0] | m.q[1] | m.q[2] | m.q[3];
    return (found[0] | found[1] | found[2] | found[3]) != 0;
  }

  static V load_bf16(const uint16_t* p) {
    return lanes<V, uint32_t>([&](int l) { return uint32_t(p[l]) << 16; });
  }
  static V load_i8(const uint8_t* p) {
    return lanes<V, float>([&](int l) { return float(int8_t(p[l])); });
  }
  static void store_bf16(uint16_t* p, V v) {   // to nearest even; NaN stays NaN
    for (int i = 0; i < 4; ++i) {
      const Words bits = Words(v.q[i]), rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
      const Words number = Words(v.q[i] == v.q[i]), out = (number & rounded) | (~number & 0x7FC0);
      for (int l = 0; l < 4; ++l) p[4 * i + l] = uint16_t(out[l]);
    }
  }
  static void store_i8(int8_t* p, I v) {
    const I in = select_i(less_i(v, seti(-128)), seti(-128), select_i(less_i(seti(127), v), seti(127), v));
    for (int l = 0; l < 16; ++l) p[l] = int8_t(lane<int32_t>(in, l));
  }
  static void store_u8(uint8_t* p, I v) {   // of 0 to 255
    for (int l = 0; l < 16; ++l) p[l] = uint8_t(lane<int32_t>(v, l));
  }

  // All lanes put together; floats are added in the same tree everywhere: lane l + 8 to lane l, then l + 4, l + 2, l + 1.
  static float sum_lanes(V v) {
    const Floats four = (v.q[0] + v.q[2]) + (v.q[1] + v.q[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
  }
  static float max_lanes(V v) {
    const V two = max(v, swap_halves(v));
    float most = two.q[0][0];
    for (int l = 1; l < 8; ++l) most = std::max(most, lane<float>(two, l));
    return most;
  }
  static int32_t sum_lanes(I v) {
    const Ints four = (v.q[0] + v.q[2]) + (v.q[1] + v.q[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
  }
  static V swap_halves(V v) { return {{v.q[2], v.q[3], v.q[0], v.q[1]}}; }

  // The sums of a block of codes (0 to 15) times activations.
  using CodeSum = I;
  static CodeSum no_codes() { return seti(0); }
  static CodeSum add_codes(CodeSum a, CodeSum b) { return addi(a, b); }
  static I sum_of_codes(CodeSum sum) { return sum; }
  // What the sum of 16 codes of int6 (0 to 63) begins with, so that it is one of codes less 32.
  static int32_t start_of(I values) { return -32 * sum_lanes(values); }
  static CodeSum start(int32_t of) { return seti(of); }
  // acc += two products for each lane: weights [16][2] (bfloat16) with the same two activations, as floats in words that many
  // apart: the first products, then the second ones.
  static constexpr int kBf16Words = 2;
  static V dot2(V acc, const uint16_t* weights, const uint32_t* two, int apart) {
    const Floats first = set1(ppsd::bits_to_float(two[0])).q[0], second = set1(ppsd::bits_to_float(two[apart])).q[0];
    return quarters<V>([&](int i) {
      Words pairs;
      std::memcpy(&pairs, weights + 8 * i, sizeof pairs);
      return fma(Floats(pairs & 0xFFFF0000u), second, fma(Floats(pairs << 16), first, acc.q[i]));
    });
  }

#if defined(__aarch64__)
  static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static V round(V a) {
    return quarters<V>([&](int i) { return Floats(vrndnq_f32(a.q[i])); });
  }
  static I to_int(V a) {
    return quarters<I>([&](int i) { return Ints(vcvtnq_s32_f32(a.q[i])); });
  }
  static V load_f16(const uint16_t* p) {
    return quarters<V>([&](int i) { return Floats(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); });
  }
  // In assembly, as on x86: a compiler may take a loop that does nothing but ask for one that does nothing.
  static void prefetch(const void* p) { asm volatile("prfm pldl1keep, [%0]" : : "r"(p)); }
  static void prefetch_far(const void* p) { asm volatile("prfm pldl2keep, [%0]" : : "r"(p)); }

  // Weights [16][4]: as int8, or the codes of int4's low and high halves.
  struct W {
    int8x16_t q[4];
  };
  struct Codes {
    W low, high;
  };
  static W bytes(const uint8_t* weights) {
    return quarters<W>([&](int i) { return vld1q_s8(reinterpret_cast<const int8_t*>(weights) + 16 * i); });
  }
  static Codes codes(const uint8_t* weights) {
    return {quarters<W>([&](int i) { return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(weights + 16 * i), vdupq_n_u8(15))); }),
            quarters<W>([&](int i) { return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(weights + 16 * i), 4)); })};
  }
  // The codes of int6 of 16 inputs, as words of four.
  struct Sixes {
    W words[4];
  };
  static Sixes sixes(const uint8_t* codes) {
    Sixes out;
    const uint8x16_t low = vdupq_n_u8(15), high = vdupq_n_u8(0x30);
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t first = vld1q_u8(codes + 16 * i), second = vld1q_u8(codes + 64 + 16 * i), two = vld1q_u8(codes + 128 + 16 * i);
      const auto six = [&](uint8x16_t a, uint8x16_t b) { return vreinterpretq_s8_u8(vorrq_u8(a, vandq_u8(b, high))); };
      out.words[0].q[i] = six(vandq_u8(first, low), vshlq_n_u8(two, 4));
      out.words[1].q[i] = six(vshrq_n_u8(first, 4), vshlq_n_u8(two, 2));
      out.words[2].q[i] = six(vandq_u8(second, low), two);
      out.words[3].q[i] = six(vshrq_n_u8(second, 4), vshrq_n_u8(two, 2));
    }
    return out;
  }
  // Four activations, in the lowest lane or in all.
  static int8x16_t four(const uint32_t* word) { return vreinterpretq_s8_u32(vld1q_dup_u32(word)); }
  // acc += four products for each lane, both factors within +-127.
  static I dot4(I acc, const W& w, int8x16_t x) {
    return quarters<I>([&](int i) {
#if defined(__ARM_FEATURE_DOTPROD)
      return Ints(vdotq_s32(acc.q[i], w.q[i], x));
#else
      const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(w.q[i]), vget_low_s8(x)), vmull_high_s8(w.q[i], x));
      return Ints(vpadalq_s16(acc.q[i], pairs));   // no pair of products leaves 16 bits
#endif
    });
  }
  static CodeSum dot4_codes(CodeSum acc, const W& codes, int8x16_t x) { return dot4(acc, codes, x); }
  // The same of values (signed) with four shares (unsigned, kMostShare at most).
  static constexpr int kMostShare = 127;
  static I take4(I acc, const W& values, int8x16_t shares) { return dot4(acc, values, shares); }
#else
  // Not fused: a machine without the instruction would call a function for every lane.
  static Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
  static V round(V a) {
    return lanes<V, float>([&](int l) { return std::nearbyint(lane<float>(a, l)); });
  }
  static I to_int(V a) {
    return lanes<I, int32_t>([&](int l) { return int32_t(std::nearbyint(lane<float>(a, l))); });
  }
  static V load_f16(const uint16_t* p) {
    return lanes<V, float>([&](int l) { return half_to_float(p[l]); });
  }
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
  static const int8_t* four(const uint32_t* word) { return reinterpret_cast<const int8_t*>(word); }
  // acc += four products for each lane.
  template <class Factor>
  static I products(I acc, const int8_t* w, const int8_t* x) {
    return addi(acc, lanes<I, int32_t>([&](int l) {
      int32_t sum = 0;
      for (int k = 0; k < 4; ++k) sum += int32_t(w[4 * l + k]) * Factor(x[k]);
      return sum;
    }));
  }
  static I dot4(I acc, const int8_t* w, const int8_t* activations) { return products<int8_t>(acc, w, activations); }
  static CodeSum dot4_codes(CodeSum acc, const int8_t* codes, const int8_t* x) { return dot4(acc, codes, x); }
  // The same of values (signed) with four shares (unsigned, kMostShare at most).
  static constexpr int kMostShare = 255;
  static I take4(I acc, const int8_t* values, const int8_t* shares) { return products<uint8_t>(acc, values, shares); }
#endif
};

}  // namespace
}  // namespace ppsd
