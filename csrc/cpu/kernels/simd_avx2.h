// Sixteen lanes on AVX2 (with FMA and F16C): two registers each. With PPSD_AVXVNNI the dot instruction of AVX-VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_x86.h"

namespace ppsd {
namespace {

struct Simd {
  struct V {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };
  struct M {
    __m256i a, b;   // all ones where true
  };

#ifdef PPSD_AVXVNNI
  static constexpr int kWeightOffset = 128;   // int8 weights are stored as unsigned: the dot instruction wants it so
#else
  static constexpr int kWeightOffset = 0;
#endif
  static constexpr int kRows = 4;   // of a micro-kernel: some sums leave the registers, but weights are made ready half as often
  static constexpr int kSums = 5;             // sums beside each other in attention: two of 16 registers each

  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, V v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
  }
  static V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static V abs(V x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
  }
  static V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static V round(V x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
  }

  static V scale2(V a, V n) {   // a * 2^n, n a whole number from -126 to 127
    return mul(a, bits_to_float(shift_left(addi(to_int(n), seti(127)), 23)));
  }

  static I seti(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I loadi(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
  }
  static void storei(int32_t* p, I v) {
    _mm256_storeu_si256((__m256i*)p, v.a);
    _mm256_storeu_si256((__m256i*)(p + 8), v.b);
  }
  static I addi(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static V to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static I to_int(V x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static V bits_to_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
  static I float_to_bits(V x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
  static I shift_left(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
  static I shift_right(I x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
  static I bit_and(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
  static I bit_or(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }

  static I bit_xor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
  static void mul_wide(I x, uint32_t m, I* high, I* low) {
    const __m256i b = _mm256_set1_epi32(int(m));
    mul_wide(x.a, b, &high->a, &low->a);
    mul_wide(x.b, b, &high->b, &low->b);
  }
  static V unsigned_to_float(I x) { return {unsigned_to_float(x.a), unsigned_to_float(x.b)}; }

  static M less(V x, V y) {
    return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
  }
  static M less_i(I x, I y) { return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)}; }
  static V select(M m, V yes, V no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(m.a)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(m.b))};
  }
  static I select_i(M m, I yes, I no) {
    return {_mm256_blendv_epi8(no.a, yes.a, m.a), _mm256_blendv_epi8(no.b, yes.b, m.b)};
  }
  static bool any(M m) { return _mm256_movemask_epi8(_mm256_or_si256(m.a, m.b)) != 0; }

  static V load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
  }
  static V load_bf16(const uint16_t* p) {
    const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  }
  static V load_i8(const uint8_t* p) {
    return to_float({_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                     _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))});
  }
  static void store_bf16(uint16_t* p, V v) {
    const __m256i packed = _mm256_packus_epi32(to_bf16(v.a), to_bf16(v.b));   // within 128-bit lanes
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
  }
  static void store_u8(uint8_t* p, I v) {   // of 0 to 255
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xD8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
  static void store_i8(int8_t* p, I v) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xD8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }

  // All lanes put together; floats are added in the same tree everywhere: lane l + 8 to lane l, then l + 4, l + 2, l + 1.
  static float sum_lanes(V v) { return sum_of_eight(_mm256_add_ps(v.a, v.b)); }
  static float max_lanes(V v) { return max_of_eight(_mm256_max_ps(v.a, v.b)); }
  static int32_t sum_lanes(I v) { return sum_of_eight(_mm256_add_epi32(v.a, v.b)); }

  static V swap_halves(V v) { return {v.b, v.a}; }

  static __m256i four(const uint32_t* word) { return _mm256_set1_epi32(int(*word)); }
  // Weights [16][4]: as int8, or the codes of int4's low and high halves.
  struct W {
    __m256i a, b;
  };
  struct Codes {
    W low, high;
  };
  static W bytes(const uint8_t* weights) {
    return {_mm256_load_si256((const __m256i*)weights), _mm256_load_si256((const __m256i*)(weights + 32))};
  }
  static Codes codes(const uint8_t* weights) {
    const W both = bytes(weights);
    return {{low_half(both.a), low_half(both.b)},
            {low_half(_mm256_srli_epi16(both.a, 4)), low_half(_mm256_srli_epi16(both.b, 4))}};
  }
  // The codes of int6 of 16 inputs, as words of four.
  struct Sixes {
    W words[4];
  };
  static Sixes sixes(const uint8_t* codes) {
    const W first = bytes(codes), second = bytes(codes + 64), high = bytes(codes + 128);
    Sixes out;
    sixes(first.a, second.a, high.a, &out.words[0].a, &out.words[1].a, &out.words[2].a, &out.words[3].a);
    sixes(first.b, second.b, high.b, &out.words[0].b, &out.words[1].b, &out.words[2].b, &out.words[3].b);
    return out;
  }
  static I dot4(I acc, const W& weights, __m256i four) {
    return {dot4(acc.a, weights.a, four), dot4(acc.b, weights.b, four)};
  }
  // The sums of a block of codes (0 to 15) times activations. Without the dot instruction two of 16 bits for each lane: of a
  // block's 32 inputs each has half, and 16 * 15 * 127 fits.
#ifdef PPSD_AVXVNNI
  using CodeSum = I;
  static CodeSum add_codes(CodeSum x, CodeSum y) { return addi(x, y); }
  static CodeSum dot4_codes(CodeSum acc, const W& codes, __m256i four) { return dot4(acc, codes, four); }
  static I sum_of_codes(CodeSum sum) { return sum; }
  static int32_t start_of(I values) { return -32 * sum_lanes(values); }
  static CodeSum start(int32_t of) { return seti(of); }
#else
  struct CodeSum {
    __m256i a, b;
  };
  static CodeSum add_codes(CodeSum x, CodeSum y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
  static CodeSum dot4_codes(CodeSum acc, const W& codes, __m256i four) {
    return add_codes(acc, {_mm256_maddubs_epi16(codes.a, four), _mm256_maddubs_epi16(codes.b, four)});
  }
  static I sum_of_codes(CodeSum sum) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sum.a, one), _mm256_madd_epi16(sum.b, one)};
  }
  // What the sums of 16 codes of int6 (0 to 63) begin with, so that they are of codes less 32: -32 times the values that each of a
  // lane's two is of. It takes 8 products, so it stays within 8 * 32 * 127, which fits.
  static int32_t start_of(I values) {
    const __m256i eight = _mm256_add_epi32(values.a, values.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_slli_epi32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)), 5);
    const uint32_t even = uint32_t(-_mm_extract_epi32(four, 0)), odd = uint32_t(-_mm_extract_epi32(four, 2));
    return int32_t((even & 0xFFFF) | odd << 16);
  }
  static CodeSum start(int32_t of) { return {_mm256_set1_epi32(of), _mm256_set1_epi32(of)}; }
#endif
  static CodeSum no_codes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  // acc += four products for each lane: values (signed) with the same four shares (unsigned, kMostShare at most).
#ifdef PPSD_AVXVNNI
  static constexpr int kMostShare = 255;
#else
  static constexpr int kMostShare = 127;   // no pair of products leaves 16 bits
#endif
  static I take4(I acc, const W& values, __m256i four) {
    return {take4(acc.a, values.a, four), take4(acc.b, values.b, four)};
  }
  // acc += two products for each lane: weights [16][2] (bfloat16) with the same two activations, as floats in words that many
  // apart: the first products, then the second ones, as fused steps.
  static constexpr int kBf16Words = 2;
  static V dot2(V acc, const uint16_t* weights, const uint32_t* two, int apart) {
    const float* x = reinterpret_cast<const float*>(two);
    const __m256 first = _mm256_broadcast_ss(x), second = _mm256_broadcast_ss(x + apart);
    return {dot2(acc.a, _mm256_load_si256((const __m256i*)weights), first, second),
            dot2(acc.b, _mm256_load_si256((const __m256i*)(weights + 16)), first, second)};
  }
  static void prefetch(const void* p) { ppsd::prefetch(p); }
  static void prefetch_far(const void* p) { ppsd::prefetch_far(p); }

 private:
  static void mul_wide(__m256i a, __m256i b, __m256i* high, __m256i* low) {
    const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  }
  static __m256 unsigned_to_float(__m256i a) {   // both halves are exact, so their sum is rounded once
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xFFFF)));
    return _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0f)), low);
  }
  static __m256i to_bf16(__m256 x) {   // to nearest even, in the low halves of the lanes; NaN stays NaN
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC00000), nan), 16);
  }
  static __m256i low_half(__m256i both) { return _mm256_and_si256(both, _mm256_set1_epi8(15)); }
  static __m256i six(__m256i low, __m256i high) {
    return _mm256_or_si256(low_half(low), _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
  }
  static void sixes(__m256i first, __m256i second, __m256i high, __m256i* a, __m256i* b, __m256i* c, __m256i* d) {
    *a = six(first, _mm256_slli_epi16(high, 4));
    *b = six(_mm256_srli_epi16(first, 4), _mm256_slli_epi16(high, 2));
    *c = six(second, high);
    *d = six(_mm256_srli_epi16(second, 4), _mm256_srli_epi16(high, 2));
  }
#ifdef PPSD_AVXVNNI
  static __m256i dot4(__m256i acc, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
  static __m256i take4(__m256i acc, __m256i values, __m256i four) { return _mm256_dpbusd_avx_epi32(acc, four, values); }
#else
  static __m256i dot4(__m256i acc, __m256i w, __m256i x) {
    // Weights and activations are within +-127, so that no pair of products leaves 16 bits.
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static __m256i take4(__m256i acc, __m256i values, __m256i four) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(four, values), _mm256_set1_epi16(1)));
  }
#endif
  static __m256 dot2(__m256 acc, __m256i w, __m256 first, __m256 second) {
    const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xFFFF0000u))));
    return _mm256_fmadd_ps(high, second, _mm256_fmadd_ps(low, first, acc));
  }
};

}  // namespace
}  // namespace ppsd
