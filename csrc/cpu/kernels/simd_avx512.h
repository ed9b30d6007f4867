// Sixteen lanes on AVX-512 (F, BW, DQ, VL, VNNI), with its dot instruction for bfloat16 where the compiler may use that.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_x86.h"

namespace ppsd {
namespace {

struct Simd {
  using V = __m512;    // 16 floats
  using I = __m512i;   // 16 int32
  using M = __mmask16;

  static constexpr int kWeightOffset = 128;   // int8 weights are stored as unsigned: the dot instruction wants it so
  static constexpr int kRows = 8;             // rows of a micro-kernel: two registers for each of them, of 32
  static constexpr int kSums = 16;            // sums beside each other in attention, of 32 registers

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V abs(V a) { return _mm512_abs_ps(a); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static V scale2(V a, V n) { return _mm512_scalef_ps(a, n); }   // a * 2^n, n a whole number from -126 to 127

  static I seti(int32_t x) { return _mm512_set1_epi32(x); }
  static I loadi(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void storei(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
  static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
  static V to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I to_int(V a) { return _mm512_cvtps_epi32(a); }   // to nearest, ties to even
  static V bits_to_float(I a) { return _mm512_castsi512_ps(a); }
  static I float_to_bits(V a) { return _mm512_castps_si512(a); }
  static I shift_left(I a, int n) { return _mm512_slli_epi32(a, n); }
  static I shift_right(I a, int n) { return _mm512_srli_epi32(a, n); }
  static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }

  static I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
  // The high and the low 32 bits of a * m, all unsigned.
  static void mul_wide(I a, uint32_t m, I* high, I* low) {
    const I b = _mm512_set1_epi32(int(m));
    const I even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    *low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  }
  static V unsigned_to_float(I a) { return _mm512_cvtepu32_ps(a); }

  static M less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static M less_i(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
  static V select(M m, V yes, V no) { return _mm512_mask_blend_ps(m, no, yes); }
  static I select_i(M m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }
  static bool any(M m) { return m != 0; }

  static V load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static V load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
  }
  static V load_i8(const uint8_t* p) { return to_float(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)p))); }
  static void store_bf16(uint16_t* p, V v) { _mm256_storeu_si256((__m256i*)p, to_bf16(v)); }
  static void store_i8(int8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v)); }
  static void store_u8(uint8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }   // of 0 to 255

  // All lanes put together; floats are added in the same tree everywhere: lane l + 8 to lane l, then l + 4, l + 2, l + 1.
  static float sum_lanes(V v) {
    return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  static float max_lanes(V v) {
    return max_of_eight(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  static int32_t sum_lanes(I v) {
    return sum_of_eight(_mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)));
  }

  // Lanes 0-7 and 8-15 change places.
  static V swap_halves(V v) { return _mm512_shuffle_f32x4(v, v, 0x4E); }

  // Four activations (signed) for every lane.
  static I four(const uint32_t* word) { return _mm512_set1_epi32(int(*word)); }
  // Weights [16][4]: as int8, or the codes of int4's low and high halves.
  using W = __m512i;
  struct Codes {
    W low, high;
  };
  static W bytes(const uint8_t* weights) { return _mm512_load_si512(weights); }
  static Codes codes(const uint8_t* weights) {
    const __m512i both = _mm512_load_si512(weights), mask = _mm512_set1_epi8(15);
    return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
  }
  // The codes of int6 of 16 inputs, as words of four.
  struct Sixes {
    W words[4];
  };
  static Sixes sixes(const uint8_t* codes) {
    const W first = bytes(codes), second = bytes(codes + 64), high = bytes(codes + 128);
    const auto six = [](W low, W high) {
      return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(15)), _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
    };
    return {{six(first, _mm512_slli_epi16(high, 4)), six(_mm512_srli_epi16(first, 4), _mm512_slli_epi16(high, 2)),
             six(second, high), six(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(high, 2))}};
  }
  // acc += four products for each lane: weights (unsigned) with the same four activations.
  static I dot4(I acc, W weights, I four) { return _mm512_dpbusd_epi32(acc, weights, four); }
  // The sums of a block of codes (0 to 15) times activations.
  using CodeSum = I;
  static CodeSum no_codes() { return seti(0); }
  static CodeSum dot4_codes(CodeSum acc, W codes, I four) { return dot4(acc, codes, four); }
  static CodeSum add_codes(CodeSum a, CodeSum b) { return addi(a, b); }
  static I sum_of_codes(CodeSum sum) { return sum; }
  // What the sum of 16 codes of int6 (0 to 63) begins with, so that it is one of codes less 32.
  static int32_t start_of(I values) { return -32 * sum_lanes(values); }
  static CodeSum start(int32_t of) { return seti(of); }
  // acc += four products for each lane: values (signed) with the same four shares (unsigned, kMostShare at most).
  static constexpr int kMostShare = 255;
  static I take4(I acc, W values, I four) { return _mm512_dpbusd_epi32(acc, four, values); }
  // acc += two products for each lane: weights [16][2] (bfloat16) with the same two activations: in one word, or as floats in two
  // words, that many apart; then the first products are added and then the second ones, as fused steps.
#ifdef __AVX512BF16__
  static constexpr int kBf16Words = 1;
  static V dot2(V acc, const uint16_t* weights, const uint32_t* two, int) {
    const __m512i both = _mm512_set1_epi32(int(*two));
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_load_si512(weights), (__m512bh)both);
  }
#else
  static constexpr int kBf16Words = 2;
  static V dot2(V acc, const uint16_t* weights, const uint32_t* two, int apart) {
    const __m512i both = _mm512_load_si512(weights);
    const V low = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    const V high = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xFFFF0000u))));
    const float* x = reinterpret_cast<const float*>(two);
    return fma(high, set1(x[apart]), fma(low, set1(x[0]), acc));
  }
#endif
  // Ask for a line of memory, for now or for later (it need not be in the first cache); an address past the end of all
  // does no harm.
  static void prefetch(const void* p) { ppsd::prefetch(p); }
  static void prefetch_far(const void* p) { ppsd::prefetch_far(p); }

 private:
#ifdef __AVX512BF16__
  static __m256i to_bf16(V x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
  static __m256i to_bf16(V x) {   // to nearest even; NaN stays NaN
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i whole =
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, _mm512_set1_epi32(0x7FC00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(whole, 16));
  }
#endif
};

}  // namespace
}  // namespace ppsd
