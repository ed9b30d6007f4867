// Matrices of int8, int6 and int4 times many rows in the tile registers of AMX.
//
// The sum of a block of 32 inputs is one of integers, so it has the bits that the dot instruction gives. It must leave the
// tiles to be scaled, block by block; and while tile instructions are under way, a core does one operation on 512 bits a
// cycle, not two. So the tiles pay for many rows only, and a few stay with the dot instruction.
#pragma once

#include <algorithm>
#include <cstring>

#include "ahead.h"
#include "tiles.h"

namespace ppsd {
namespace {

// Rows, measured: docs/history/decoding.md. Without tiles, rows beyond Simd::kRows read a panel again; of a wide one much has
// left the first cache by then, so tiles pay as soon as there are more.
constexpr int kInt8TilesFrom = 24, kInt4TilesFrom = 12, kWide = 1024;
constexpr int kSome = 8;             // blocks of 32 at a time: weights and sums of so many stay in the first cache
constexpr int kTogether = 4;         // blocks in tiles at once
constexpr int kScaled = 8;           // rows scaled at a time
constexpr int kBlockBytes = kBlock * kPanel;   // of weights as int8: eight words of four inputs, [8][16][4]

// Inputs that share a scale.
template <Format F>
constexpr int kDeep = F == Format::kInt6 ? kSixes : kBlock;

// Some blocks of a panel as the tile unit wants them.
struct SomeBlocks {
  alignas(64) int8_t weights[kSome][kBlockBytes];
  alignas(64) float scales[kSome * kBlock / kSixes][kPanel], minima[kSome][kPanel];   // minima: of int4
};

using Dots = int32_t[kSome * kBlock / kSixes][kTileRows * kPanel];   // for each of `scales`

// Packed weights are unsigned, with an offset that their highest bit is: the tile unit takes them signed.
inline I without_offset(I weights) { return Simd::bit_xor(weights, Simd::seti(int32_t(0x80808080u))); }

template <Format F>
inline void take_blocks(const Matrix& w, int p, int from, int count, const Ahead& ahead, SomeBlocks* out) {
  static_assert(Simd::kWeightOffset == 128);
  for (int b = 0; b < count; ++b) {
    ask(ahead, from + b);
    int8_t* to = out->weights[b];
    if constexpr (F == Format::kInt4) {   // inputs 0 to 15 in the low halves, 16 to 31 in the high ones
      const uint8_t* block = w.panel(p) + size_t(from + b) * kInt4Block;
      Simd::store(out->scales[b], Simd::load_f16(reinterpret_cast<const uint16_t*>(block)));
      Simd::store(out->minima[b], Simd::load_f16(reinterpret_cast<const uint16_t*>(block + kInt4Minima)));
      for (int at = 0; at < kBlockBytes / 2; at += 64) {
        const auto codes = Simd::codes(block + kInt4Codes + at);
        Simd::storei(reinterpret_cast<int32_t*>(to + at), codes.low);
        Simd::storei(reinterpret_cast<int32_t*>(to + kBlockBytes / 2 + at), codes.high);
      }
    } else if constexpr (F == Format::kInt6) {
      constexpr int kBlocks = kInt6Inputs / kBlock;
      const uint8_t* block = w.panel(p) + (from + b) / kBlocks * size_t(kInt6Block);
      const V common = Simd::load_f16(reinterpret_cast<const uint16_t*>(block));
      for (int half = 0; half < 2; ++half) {
        const int sixteen = (from + b) % kBlocks * 2 + half;
        const V scale = Simd::load_i8(block + kInt6Scales + sixteen * kPanel);
        Simd::store(out->scales[2 * b + half], Simd::mul(common, scale));
        for (const I& codes : Simd::sixes(block + kInt6Codes + sixteen * kSixesBytes).words) {
          Simd::storei(reinterpret_cast<int32_t*>(to), _mm512_sub_epi8(codes, _mm512_set1_epi8(32)));
          to += 64;
        }
      }
    } else {
      const uint8_t* packed = w.panel(p) + w.scale_bytes() + size_t(from + b) * kBlockBytes;
      Simd::store(out->scales[b], Simd::load_f16(reinterpret_cast<const uint16_t*>(w.panel(p)) + (from + b) * kPanel));
      for (int at = 0; at < kBlockBytes; at += 64)
        Simd::storei(reinterpret_cast<int32_t*>(to + at), without_offset(Simd::bytes(packed + at)));
    }
  }
}

// Sixteen rows times what `count` scales are of, a sum of integers [16 rows][16 outputs] for each. x: [blocks][in.rows][32] int8;
// beyond the last row are values of no meaning, and so are their sums.
template <int Deep>
inline void dot_blocks(const SomeBlocks& blocks, int count, const uint8_t* x, size_t step, Dots& dots) {
  const auto* weights = reinterpret_cast<const uint8_t*>(blocks.weights);
  const auto each = [&](int first, auto tile) {
    constexpr int kRows = 4 + tile % 2, kWeights = 6 + tile % 2;
    constexpr int kEach = kBlock / Deep;
    const int at = first + tile;
    tile_load<kRows>(x + at / kEach * step + at % kEach * Deep, kBlock);
    tile_load<kWeights>(weights + at * Deep * kPanel, 4 * kPanel);
    tile_zero<tile>();
    tile_dot_int8<tile, kRows, kWeights>();
  };
  int b = 0;
  for (; b + kTogether <= count; b += kTogether) {
    each(b, std::integral_constant<int, 0>());
    each(b, std::integral_constant<int, 1>());
    each(b, std::integral_constant<int, 2>());
    each(b, std::integral_constant<int, 3>());
    tile_store<0>(dots[b]);
    tile_store<1>(dots[b + 1]);
    tile_store<2>(dots[b + 2]);
    tile_store<3>(dots[b + 3]);
  }
  for (; b < count; ++b) {
    each(b, std::integral_constant<int, 0>());
    tile_store<0>(dots[b]);
  }
}

// sums [8 rows][16 outputs] += the integers of those rows times the scales, and with int4 the minima times minus_sums, in the
// order of the blocks. scales, minus_sums: those of the rows, [blocks][in.rows].
template <Format F>
inline void scale_rows(const SomeBlocks& blocks, int count, const Dots& dots, int row, const float* scales,
                       const float* minus_sums, int rows, float* sums) {
  V sum[kScaled];
  PPSD_UNROLL
  for (int i = 0; i < kScaled; ++i) sum[i] = Simd::load(sums + i * kPanel);
  for (int b = 0; b < count; ++b, scales += rows, minus_sums += rows) {
    const auto dot = [&](int at, int i) { return Simd::to_float(Simd::loadi(dots[at] + (row + i) * kPanel)); };
    if constexpr (F == Format::kInt6) {
      const V first = Simd::load(blocks.scales[2 * b]), second = Simd::load(blocks.scales[2 * b + 1]);
      PPSD_UNROLL
      for (int i = 0; i < kScaled; ++i) {
        const V scaled = Simd::fma(dot(2 * b + 1, i), second, Simd::mul(dot(2 * b, i), first));
        sum[i] = Simd::fma(scaled, Simd::set1(scales[i]), sum[i]);
      }
      continue;
    }
    const V weight_scale = Simd::load(blocks.scales[b]);
    [[maybe_unused]] const V minimum = F == Format::kInt4 ? Simd::load(blocks.minima[b]) : Simd::zero();
    PPSD_UNROLL
    for (int i = 0; i < kScaled; ++i) {
      sum[i] = Simd::fma(dot(b, i), Simd::mul(weight_scale, Simd::set1(scales[i])), sum[i]);
      if constexpr (F == Format::kInt4) sum[i] = Simd::fma(minimum, Simd::set1(minus_sums[i]), sum[i]);
    }
  }
  PPSD_UNROLL
  for (int i = 0; i < kScaled; ++i) Simd::store(sums + i * kPanel, sum[i]);
}

// Rows that lie block by block.
template <Format F, class Use>
inline void multiply_in_int8_tiles(const Matrix& w, const Activations& in, const ReadThen& next, int begin, int end,
                                   Use&& use) {
  const Tiles tiles(kDeep<F>);
  const Asking asking(w, F, next, begin, 1);
  const uint8_t* x = reinterpret_cast<const uint8_t*>(in.words);
  const size_t step = size_t(in.rows) * kBlock;
  SomeBlocks blocks;
  alignas(64) Dots dots;
  alignas(64) float sums[kPassRows * kPanel];
  for (int p = begin; p < end; ++p) {
    uintptr_t from = reinterpret_cast<uintptr_t>(w.panel(p));
    const Ahead ahead = asking.share(&from);
    std::fill(sums, sums + in.rows * kPanel, 0.0f);
    for (int b = 0; b < w.inputs / kBlock; b += kSome) {
      const int count = std::min(kSome, w.inputs / kBlock - b);
      take_blocks<F>(w, p, b, count, ahead, &blocks);
      written();
      for (int group = 0; group < in.rows; group += kTileRows) {
        dot_blocks<kDeep<F>>(blocks, count * kBlock / kDeep<F>, x + b * step + size_t(group) * kBlock, step, dots);
        for (int r = 0; r < kTileRows && group + r < in.rows; r += kScaled) {
          const size_t at = size_t(b) * in.rows + group + r;
          scale_rows<F>(blocks, count, dots, r, in.scales + at, in.minus_sums + at, in.rows, sums + (group + r) * kPanel);
        }
      }
      written();   // only now may the blocks be others
    }
    for (int r = 0; r < in.rows; ++r) use(r, p, Simd::load(sums + r * kPanel));
  }
}

}  // namespace
}  // namespace ppsd
