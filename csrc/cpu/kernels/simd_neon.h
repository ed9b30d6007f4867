// Sixteen lanes on AArch64's NEON: four registers each. With the dot instruction where the compiler's flags allow it (Armv8.2's
// DotProd); without, pairs of products in 16 bits.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace ppsd {
namespace {

struct Simd {
  struct V {
    float32x4_t a, b, c, d;
  };
  struct I {
    int32x4_t a, b, c, d;
  };
  struct M {
    uint32x4_t a, b, c, d;   // all ones where true
  };

  static constexpr int kWeightOffset = 0;
  static constexpr int kRows = 4;    // rows of a micro-kernel: 16 of 32 registers, and weights are read a register at a time
  static constexpr int kSums = 6;    // sums beside each other in attention

  static V zero() { return set1(0.0f); }
  static V set1(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {all, all, all, all};
  }
  static V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
  static void store(float* p, V v) {
    vst1q_f32(p, v.a);
    vst1q_f32(p + 4, v.b);
    vst1q_f32(p + 8, v.c);
    vst1q_f32(p + 12, v.d);
  }
  static V add(V x, V y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)}; }
  static V sub(V x, V y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)}; }
  static V mul(V x, V y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)}; }
  static V div(V x, V y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)}; }
  static V max(V x, V y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b), vmaxq_f32(x.c, y.c), vmaxq_f32(x.d, y.d)}; }
  static V min(V x, V y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b), vminq_f32(x.c, y.c), vminq_f32(x.d, y.d)}; }
  static V abs(V x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
  static V fma(V x, V y, V z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
  }
  static V round(V x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)}; }

  static V scale2(V a, V n) {   // a * 2^n, n a whole number from -126 to 127
    return mul(a, bits_to_float(shift_left(addi(to_int(n), seti(127)), 23)));
  }

  static I seti(int32_t x) {
    const int32x4_t all = vdupq_n_s32(x);
    return {all, all, all, all};
  }
  static I loadi(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
  static void storei(int32_t* p, I v) {
    vst1q_s32(p, v.a);
    vst1q_s32(p + 4, v.b);
    vst1q_s32(p + 8, v.c);
    vst1q_s32(p + 12, v.d);
  }
  static I addi(I x, I y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)}; }
  static V to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)}; }
  static I to_int(V x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b), vcvtnq_s32_f32(x.c), vcvtnq_s32_f32(x.d)}; }
  static V bits_to_float(I x) {
    return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b), vreinterpretq_f32_s32(x.c), vreinterpretq_f32_s32(x.d)};
  }
  static I float_to_bits(V x) {
    return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b), vreinterpretq_s32_f32(x.c), vreinterpretq_s32_f32(x.d)};
  }
  static I shift_left(I x, int n) {
    const int32x4_t by = vdupq_n_s32(n);
    return {vshlq_s32(x.a, by), vshlq_s32(x.b, by), vshlq_s32(x.c, by), vshlq_s32(x.d, by)};
  }
  static I shift_right(I x, int n) {   // zeros come in from above
    const int32x4_t by = vdupq_n_s32(-n);
    return {shift(x.a, by), shift(x.b, by), shift(x.c, by), shift(x.d, by)};
  }
  static I bit_and(I x, I y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b), vandq_s32(x.c, y.c), vandq_s32(x.d, y.d)}; }
  static I bit_or(I x, I y) { return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b), vorrq_s32(x.c, y.c), vorrq_s32(x.d, y.d)}; }
  static I bit_xor(I x, I y) { return {veorq_s32(x.a, y.a), veorq_s32(x.b, y.b), veorq_s32(x.c, y.c), veorq_s32(x.d, y.d)}; }
  static void mul_wide(I x, uint32_t m, I* high, I* low) {
    const uint32x4_t by = vdupq_n_u32(m);
    mul_wide(x.a, by, &high->a, &low->a);
    mul_wide(x.b, by, &high->b, &low->b);
    mul_wide(x.c, by, &high->c, &low->c);
    mul_wide(x.d, by, &high->d, &low->d);
  }
  static V unsigned_to_float(I x) {
    return {unsigned_to_float(x.a), unsigned_to_float(x.b), unsigned_to_float(x.c), unsigned_to_float(x.d)};
  }

  static M less(V x, V y) { return {vcltq_f32(x.a, y.a), vcltq_f32(x.b, y.b), vcltq_f32(x.c, y.c), vcltq_f32(x.d, y.d)}; }
  static M less_i(I x, I y) { return {vcltq_s32(x.a, y.a), vcltq_s32(x.b, y.b), vcltq_s32(x.c, y.c), vcltq_s32(x.d, y.d)}; }
  static V select(M m, V yes, V no) {
    return {vbslq_f32(m.a, yes.a, no.a), vbslq_f32(m.b, yes.b, no.b), vbslq_f32(m.c, yes.c, no.c),
            vbslq_f32(m.d, yes.d, no.d)};
  }
  static I select_i(M m, I yes, I no) {
    return {vbslq_s32(m.a, yes.a, no.a), vbslq_s32(m.b, yes.b, no.b), vbslq_s32(m.c, yes.c, no.c),
            vbslq_s32(m.d, yes.d, no.d)};
  }
  static bool any(M m) { return vmaxvq_u32(vorrq_u32(vorrq_u32(m.a, m.b), vorrq_u32(m.c, m.d))) != 0; }

  static V load_f16(const uint16_t* p) { return {half(p), half(p + 4), half(p + 8), half(p + 12)}; }
  static V load_bf16(const uint16_t* p) { return {bf16(p), bf16(p + 4), bf16(p + 8), bf16(p + 12)}; }
  static V load_i8(const uint8_t* p) {
    const int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
    return to_float({vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)});
  }
  static void store_bf16(uint16_t* p, V v) {
    vst1_u16(p, to_bf16(v.a));
    vst1_u16(p + 4, to_bf16(v.b));
    vst1_u16(p + 8, to_bf16(v.c));
    vst1_u16(p + 12, to_bf16(v.d));
  }
  static void store_i8(int8_t* p, I v) {
    const int16x8_t low = vcombine_s16(vqmovn_s32(v.a), vqmovn_s32(v.b)), high = vcombine_s16(vqmovn_s32(v.c), vqmovn_s32(v.d));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  }
  static void store_u8(uint8_t* p, I v) {   // of 0 to 255
    const int16x8_t low = vcombine_s16(vmovn_s32(v.a), vmovn_s32(v.b)), high = vcombine_s16(vmovn_s32(v.c), vmovn_s32(v.d));
    vst1q_u8(p, vcombine_u8(vqmovun_s16(low), vqmovun_s16(high)));
  }

  // All lanes put together; floats are added in the same tree everywhere: lane l + 8 to lane l, then l + 4, l + 2, l + 1.
  static float sum_lanes(V v) {
    const float32x4_t four = vaddq_f32(vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  static float max_lanes(V v) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.a, v.b), vmaxq_f32(v.c, v.d))); }
  static int32_t sum_lanes(I v) { return vaddvq_s32(vaddq_s32(vaddq_s32(v.a, v.b), vaddq_s32(v.c, v.d))); }

  static V swap_halves(V v) { return {v.c, v.d, v.a, v.b}; }

  // In assembly, as on x86: a compiler may take a loop that does nothing but ask for one that does nothing.
  static void prefetch(const void* p) { asm volatile("prfm pldl1keep, [%0]" : : "r"(p)); }
  static void prefetch_far(const void* p) { asm volatile("prfm pldl2keep, [%0]" : : "r"(p)); }

  // Weights [16][4]: as int8, or the codes of int4's low and high halves.
  struct W {
    int8x16_t a, b, c, d;
  };
  struct Codes {
    W low, high;
  };
  static W bytes(const uint8_t* weights) {
    const int8_t* w = reinterpret_cast<const int8_t*>(weights);
    return {vld1q_s8(w), vld1q_s8(w + 16), vld1q_s8(w + 32), vld1q_s8(w + 48)};
  }
  static Codes codes(const uint8_t* weights) {
    const uint8x16_t a = vld1q_u8(weights), b = vld1q_u8(weights + 16), c = vld1q_u8(weights + 32), d = vld1q_u8(weights + 48);
    return {{low_half(a), low_half(b), low_half(c), low_half(d)}, {high_half(a), high_half(b), high_half(c), high_half(d)}};
  }
  // The codes of int6 of 16 inputs, as words of four.
  struct Sixes {
    W words[4];
  };
  static Sixes sixes(const uint8_t* codes) {
    Sixes out;
    W* w = out.words;
    sixes(codes, &w[0].a, &w[1].a, &w[2].a, &w[3].a);
    sixes(codes + 16, &w[0].b, &w[1].b, &w[2].b, &w[3].b);
    sixes(codes + 32, &w[0].c, &w[1].c, &w[2].c, &w[3].c);
    sixes(codes + 48, &w[0].d, &w[1].d, &w[2].d, &w[3].d);
    return out;
  }
  // Four activations: in the lowest lane, which the dot instruction may choose; or in all.
#if defined(__ARM_FEATURE_DOTPROD)
  using Four = int8x8_t;
  static Four four(const uint32_t* word) { return vcreate_s8(*word); }
#else
  using Four = int8x16_t;
  static Four four(const uint32_t* word) { return vreinterpretq_s8_u32(vld1q_dup_u32(word)); }
#endif
  // acc += four products for each lane, both factors within +-127.
  static I dot4(I acc, const W& w, Four four) {
    return {dot4(acc.a, w.a, four), dot4(acc.b, w.b, four), dot4(acc.c, w.c, four), dot4(acc.d, w.d, four)};
  }
  // The sums of a block of codes (0 to 15) times activations.
  using CodeSum = I;
  static CodeSum no_codes() { return seti(0); }
  static CodeSum dot4_codes(CodeSum acc, const W& codes, Four four) { return dot4(acc, codes, four); }
  static CodeSum add_codes(CodeSum x, CodeSum y) { return addi(x, y); }
  static I sum_of_codes(CodeSum sum) { return sum; }
  // What the sum of 16 codes of int6 (0 to 63) begins with, so that it is one of codes less 32.
  static int32_t start_of(I values) { return -32 * sum_lanes(values); }
  static CodeSum start(int32_t of) { return seti(of); }
  // The same of values (signed) with four shares (unsigned, kMostShare at most).
  static constexpr int kMostShare = 127;
  static I take4(I acc, const W& values, Four four) { return dot4(acc, values, four); }
  // acc += two products for each lane: weights [16][2] (bfloat16) with the same two activations, as floats in words that many
  // apart: the first products, then the second ones, as fused steps.
  static constexpr int kBf16Words = 2;
  static V dot2(V acc, const uint16_t* weights, const uint32_t* two, int apart) {
    const float* x = reinterpret_cast<const float*>(two);
    const float first = x[0], second = x[apart];
    return {dot2(acc.a, weights, first, second), dot2(acc.b, weights + 8, first, second),
            dot2(acc.c, weights + 16, first, second), dot2(acc.d, weights + 24, first, second)};
  }

 private:
  static int32x4_t shift(int32x4_t x, int32x4_t by) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), by));
  }
  static void mul_wide(int32x4_t x, uint32x4_t by, int32x4_t* high, int32x4_t* low) {
    const uint32x4_t a = vreinterpretq_u32_s32(x);
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vget_low_u32(by)));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(a, by));
    *low = vreinterpretq_s32_u32(vuzp1q_u32(first, second));
    *high = vreinterpretq_s32_u32(vuzp2q_u32(first, second));
  }
  static float32x4_t unsigned_to_float(int32x4_t x) { return vcvtq_f32_u32(vreinterpretq_u32_s32(x)); }
  static float32x4_t half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static float32x4_t bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  static uint16x4_t to_bf16(float32x4_t x) {   // to nearest even; NaN stays NaN
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7FC00000)), 16);
  }
  static int8x16_t low_half(uint8x16_t both) { return vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))); }
  static int8x16_t high_half(uint8x16_t both) { return vreinterpretq_s8_u8(vshrq_n_u8(both, 4)); }
  static int8x16_t six(uint8x16_t low, uint8x16_t high) {
    return vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(high, vdupq_n_u8(0x30))));
  }
  static void sixes(const uint8_t* codes, int8x16_t* a, int8x16_t* b, int8x16_t* c, int8x16_t* d) {
    const uint8x16_t first = vld1q_u8(codes), second = vld1q_u8(codes + 64), high = vld1q_u8(codes + 128), low = vdupq_n_u8(15);
    *a = six(vandq_u8(first, low), vshlq_n_u8(high, 4));
    *b = six(vshrq_n_u8(first, 4), vshlq_n_u8(high, 2));
    *c = six(vandq_u8(second, low), high);
    *d = six(vshrq_n_u8(second, 4), vshrq_n_u8(high, 2));
  }
  static int32x4_t dot4(int32x4_t acc, int8x16_t w, Four x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_lane_s32(acc, w, x, 0);
#else
    // No pair of products leaves 16 bits.
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
    return vpadalq_s16(acc, pairs);
#endif
  }
  static float32x4_t dot2(float32x4_t acc, const uint16_t* weights, float first, float second) {
    const uint32x4_t w = vreinterpretq_u32_u16(vld1q_u16(weights));
    const float32x4_t low = vreinterpretq_f32_u32(vshlq_n_u32(w, 16));
    const float32x4_t high = vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xFFFF0000u)));
    return vfmaq_n_f32(vfmaq_n_f32(acc, low, first), high, second);
  }
};

}  // namespace
}  // namespace ppsd
