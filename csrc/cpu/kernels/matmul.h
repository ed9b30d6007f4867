// A matrix in panels times rows: micro-kernels for each format, and the way through the panels.
#pragma once

#include <algorithm>
#include <cstring>

#include "ahead.h"
#include "vector_math.h"
#if defined(PPSD_AMX)
#include "tiles.h"
#include "tiles_int8.h"
#endif

namespace ppsd {
namespace {

// Micro-kernels: R rows with one panel, sum[r] of sixteen outputs each. They are the group of rows that begins with row r. A sum is made in the same order whatever R is;
// it is made of several chains, because one chain of additions would wait for each of them. (Within a block of int8 the
// sum is of integers, so there the number of chains does not matter.)

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
  const uint32_t* x = in.words + size_t(r) * (w.inputs / 4);
  const float* scales = in.scales + size_t(r) * (w.inputs / kBlock);
  const int32_t* corrections = in.corrections + size_t(r) * (w.inputs / kBlock);
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
      for (int c = 0; c < kChains; ++c, x += R, weights += 4 * kPanel)
        PPSD_UNROLL
        for (int i = 0; i < R; ++i) dot[i][c] = Simd::dot4(dot[i][c], Simd::bytes(weights), Simd::four(x + i));
    add_scaled(dot, Simd::load_f16(weight_scales), scales, sum);
    weight_scales += kPanel;
    scales += R;
    corrections += R;
  }
}

// As dot_int8; a code is small, so that a block's sums may have a type of their own. The halves of 64 bytes are two words.
template <int R>
inline void dot_int4(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  constexpr int kChains = R <= 3 ? 2 : 1;
  const uint8_t* block = w.panel(p);
  constexpr int high = kBlock / 8 * R;   // from the word that meets the low halves to that of the high ones
  const size_t before = size_t(r) * (w.inputs / kBlock);   // blocks of the rows in front
  const uint32_t* x = in.words + before * (kBlock / 4);
  const float *scales = in.scales + before, *minus_sums = in.minus_sums + before;
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b, x += high, block += kInt4Block) {
    ask(ahead, b);
    Simd::CodeSum dot[R][kChains];
    PPSD_UNROLL
    for (int i = 0; i < R; ++i)
      PPSD_UNROLL
      for (int c = 0; c < kChains; ++c) dot[i][c] = Simd::no_codes();
    PPSD_UNROLL
    for (int g = 0; g < kBlock / 8; ++g, x += R) {
      const auto codes = Simd::codes(block + kInt4Codes + g * 4 * kPanel);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) dot[i][0] = Simd::dot4_codes(dot[i][0], codes.low, Simd::four(x + i));
      PPSD_UNROLL
      for (int i = 0; i < R; ++i)
        dot[i][kChains - 1] = Simd::dot4_codes(dot[i][kChains - 1], codes.high, Simd::four(x + high + i));
    }
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
    const V scale = Simd::load_f16(halves), minimum = Simd::load_f16(halves + kPanel);
    PPSD_UNROLL
    for (int i = 0; i < R; ++i) {
      if constexpr (kChains == 2) dot[i][0] = Simd::add_codes(dot[i][0], dot[i][1]);
      sum[i] = Simd::fma(Simd::to_float(Simd::sum_of_codes(dot[i][0])), Simd::mul(scale, Simd::set1(scales[i])), sum[i]);
      sum[i] = Simd::fma(minimum, Simd::set1(minus_sums[i]), sum[i]);
    }
    scales += R;
    minus_sums += R;
  }
}

// As dot_int8, of 16 inputs at a time. Codes are unsigned: what the 32 adds to their sums is what `starts` begin below.
template <int R>
inline void dot_int6(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  const uint8_t* block = w.panel(p);
  const size_t before = size_t(r) * (w.inputs / kBlock);
  const uint32_t* x = in.words + before * (kBlock / 4);
  const float* scales = in.scales + before;
  const int32_t* starts = in.starts + 2 * before;
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b, scales += R) {
    ask(ahead, b);
    constexpr int kBlocks = kInt6Inputs / kBlock;
    if (b > 0 && b % kBlocks == 0) block += kInt6Block;
    const V common = Simd::load_f16(reinterpret_cast<const uint16_t*>(block));
    V scaled[R];
    PPSD_UNROLL
    for (int half = 0; half < 2; ++half, starts += R) {
      const int sixteen = b % kBlocks * 2 + half;
      Simd::CodeSum dot[R];
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) dot[i] = Simd::start(starts[i]);
      const auto codes = Simd::sixes(block + kInt6Codes + sixteen * kSixesBytes);
      PPSD_UNROLL
      for (int g = 0; g < kSixes / 4; ++g, x += R)
        PPSD_UNROLL
        for (int i = 0; i < R; ++i) dot[i] = Simd::dot4_codes(dot[i], codes.words[g], Simd::four(x + i));
      const V scale = Simd::mul(common, Simd::load_i8(block + kInt6Scales + sixteen * kPanel));
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) {
        const V whole = Simd::to_float(Simd::sum_of_codes(dot[i]));
        scaled[i] = half == 0 ? Simd::mul(whole, scale) : Simd::fma(whole, scale, scaled[i]);
      }
    }
    PPSD_UNROLL
    for (int i = 0; i < R; ++i) sum[i] = Simd::fma(scaled[i], Simd::set1(scales[i]), sum[i]);
  }
}

// Even and odd pairs of a row are added in chains of their own.
template <int R>
inline void dot_bf16(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(w.panel(p));
  constexpr int pair = R * Simd::kBf16Words;
  const uint32_t* x = in.words + size_t(r) * (w.inputs / 2 * Simd::kBf16Words);
  V odd[R];
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = odd[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b) {
    ask(ahead, b);
    for (int k = 0; k < kBlock; k += 4, weights += 4 * kPanel, x += 2 * pair) {
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) sum[i] = Simd::dot2(sum[i], weights, x + i, R);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) odd[i] = Simd::dot2(odd[i], weights + 2 * kPanel, x + pair + i, R);
    }
  }
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::add(sum[i], odd[i]);
}

template <int R>
inline void dot_fp32(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, V (&sum)[R]) {
  const float* weights = reinterpret_cast<const float*>(w.panel(p));
  const float* x = reinterpret_cast<const float*>(in.words) + size_t(r) * w.inputs;
  V odd[R];
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = odd[i] = Simd::zero();
  for (int b = 0; b < w.inputs / kBlock; ++b) {
    ask(ahead, b);
    for (int k = 0; k < kBlock; k += 2, weights += 2 * kPanel, x += 2 * R) {
      const V even_weights = Simd::load(weights), odd_weights = Simd::load(weights + kPanel);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) sum[i] = Simd::fma(even_weights, Simd::set1(x[i]), sum[i]);
      PPSD_UNROLL
      for (int i = 0; i < R; ++i) odd[i] = Simd::fma(odd_weights, Simd::set1(x[R + i]), odd[i]);
    }
  }
  PPSD_UNROLL
  for (int i = 0; i < R; ++i) sum[i] = Simd::add(sum[i], odd[i]);
}

template <Format F, int R, class Use>
inline void dot_and_use(const Matrix& w, int p, const Activations& in, int r, const Ahead& ahead, Use&& use) {
  V sum[R];
  if constexpr (F == Format::kInt8) dot_int8<R>(w, p, in, r, ahead, sum);
  else if constexpr (F == Format::kInt6) dot_int6<R>(w, p, in, r, ahead, sum);
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

bool by_block([[maybe_unused]] Format weights, [[maybe_unused]] int rows, [[maybe_unused]] int width) {
#if defined(PPSD_AMX)
  if (width >= kWide && rows > Simd::kRows) return weights != Format::kFp32;
  return weights == Format::kBf16 || (weights >= Format::kInt8 && rows >= kInt8TilesFrom) ||
         (weights == Format::kInt4 && rows >= kInt4TilesFrom);
#else
  return false;
#endif
}

template <Format F, class Use>
inline void multiply_as(const Matrix& w, const Activations& in, const ReadThen& next, int begin, int end, Use&& use) {
#if defined(PPSD_AMX)
  if constexpr (F == Format::kBf16) return multiply_in_tiles(w, in, next, begin, end, use);
  if constexpr (activations_of(F) == Format::kInt8)
    if (in.by_block) return multiply_in_int8_tiles<F>(w, in, next, begin, end, use);
#endif
  constexpr int kMost = Simd::kRows;
  const Asking asking(w, F, next, begin, (in.rows + kMost - 1) / kMost);
  for (int p = begin; p < end; ++p) {
    uintptr_t from = reinterpret_cast<uintptr_t>(w.panel(p));
    int r = 0;
    for (; in.rows - r >= kMost; r += kMost) dot_and_use<F, kMost>(w, p, in, r, asking.share(&from), use);
    few_rows<F, kMost>(w, p, in, r, in.rows - r, asking.share(&from), use);
  }
}

// use(row, panel, sixteen outputs) for all rows and the panels [begin, end), weights read once.
template <class Use>
inline void multiply(const Matrix& w, const Activations& in, const ReadThen& next, int begin, int end, Use&& use) {
  switch (w.format) {
    case Format::kInt8: return multiply_as<Format::kInt8>(w, in, next, begin, end, use);
    case Format::kInt6: case Format::kInt4: {
      const int wide = std::clamp(w.wide_from, begin, end);
      if (w.format == Format::kInt6) multiply_as<Format::kInt6>(w, in, next, begin, wide, use);
      else multiply_as<Format::kInt4>(w, in, next, begin, wide, use);
      return multiply_as<Format::kInt8>(w, in, next, wide, end, use);
    }
    case Format::kBf16: return multiply_as<Format::kBf16>(w, in, next, begin, end, use);
    case Format::kFp32: return multiply_as<Format::kFp32>(w, in, next, begin, end, use);
  }
}

}  // namespace
}  // namespace ppsd
