// Matrices of bfloat16 times rows in the tile registers of AMX (Intel, Sapphire Rapids and later).
//
// Eight registers hold up to 16 rows of 64 bytes each. One instruction adds to [rows][16 outputs] the products of up to 16
// rows with 32 inputs of a panel, which lie in memory as the unit wants them. Its sums are made in another order than those
// of other instruction sets (of even and of odd inputs apart, 32 inputs at a time), but in the same one for any number of
// rows: so it multiplies single rows too, though these wait for memory anyway.
//
// Int8 has a file of its own, tiles_int8.h.
#pragma once

#include "vector_math.h"

namespace ppsd {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 2 * kBlock * kPanel;   // of weights: 32 inputs of a panel

template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
// Of memory that was written before the registers were shaped, or before `written`: the compiler is not told what is read.
template <int T>
inline void tile_load(const uint8_t* from, size_t step) {   // step: bytes from row to row
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(step), "i"(T));
}
inline void written() { asm volatile("" : : : "memory"); }
template <int T, class Word>   // of four bytes
inline void tile_store(Word (&to)[kTileRows * kPanel]) {
  asm volatile("tilestored %%tmm%c2, (%1,%3,1)" : "=m"(to) : "r"(&to), "i"(T), "r"(size_t(kPanel * 4)));
}
template <int C, int A, int B>   // C += A B
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
inline void tile_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// The registers' shapes, as long as this lives: sums in 0 to 3, rows of activations in 4 and 5, weights in 6 and 7.
class Tiles {
 public:
  // Of bfloat16: activations in 4 are of sixteen rows and those in 5 of the last ones, `last` of them. Bit t of `of_last`:
  // whether sums t are of the last rows.
  Tiles(int last, unsigned of_last) {
    Shapes shapes;
    for (int t = 0; t < 8; ++t) {
      const bool of_last_rows = t < 4 ? of_last >> t & 1 : t == 5;
      shapes.rows[t] = uint8_t(of_last_rows ? last : kTileRows);
      shapes.bytes[t] = 64;
    }
    take(shapes);
  }
  // Of int8: so many inputs of sixteen rows, and of a panel in words of four.
  explicit Tiles(int inputs) {
    Shapes shapes;
    for (int t = 0; t < 8; ++t) {
      shapes.rows[t] = uint8_t(t < 6 ? kTileRows : inputs / 4);
      shapes.bytes[t] = uint16_t(t == 4 || t == 5 ? inputs : 64);
    }
    take(shapes);
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};   // of a row
    uint8_t rows[16] = {};
  };
  static void take(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
};

// Some panels with some groups of up to 16 rows: at most four sums, none of which waits for another.
template <int Panels, int Groups, class Use>
inline void some_panels(const Matrix& w, int p, const Activations& in, int last, const uint8_t* ahead, Use&& use) {
  constexpr size_t step = 2 * kBlock, group_step = kTileRows * step;
  const size_t panel = w.panel_bytes(Format::kBf16);
  const uint8_t* weights = w.panel(p);
  const uint8_t* x = reinterpret_cast<const uint8_t*>(in.words);   // [blocks][rows][32] bfloat16
  const auto each_sum = [](auto&& f) {
    f(std::integral_constant<int, 0>());
    if constexpr (Panels * Groups > 1) f(std::integral_constant<int, 1>());
    if constexpr (Panels * Groups > 2) f(std::integral_constant<int, 2>());
    if constexpr (Panels * Groups > 3) f(std::integral_constant<int, 3>());
  };
  each_sum([](auto sum) { tile_zero<sum>(); });
  for (int b = 0; b < w.inputs / kBlock; ++b, weights += kTileBytes, ahead += kTileBytes, x += in.rows * step) {
    if constexpr (Panels > 1) {   // the rows stay for all of them
      if constexpr (Groups == 2) tile_load<4>(x, step);
      tile_load<5>(x + (Groups - 1) * group_step, step);
    }
    each_sum([&](auto sum) {
      constexpr int i = sum / Groups, group = sum % Groups, of_rows = group == Groups - 1 ? 5 : 4, of_weights = 6 + i % 2;
      if constexpr (group == 0) tile_load<of_weights>(weights + i * panel, 64);
      if constexpr (Panels == 1) tile_load<of_rows>(x + group * group_step, step);
      tile_dot<sum, of_rows, of_weights>();
    });
    for (int at = 0; at < kTileBytes; at += 64)   // from the panels' pages in turn, see Ahead
      for (int i = 0; i < Panels; ++i) Simd::prefetch_far(ahead + i * panel + at);
  }
  alignas(64) float sums[kTileRows * kPanel];
  each_sum([&](auto sum) {
    constexpr int i = sum / Groups, group = sum % Groups;
    tile_store<sum>(sums);
    for (int r = 0; r < (group == Groups - 1 ? last : kTileRows); ++r)
      use(group * kTileRows + r, p + i, Simd::load(sums + r * kPanel));
  });
}

template <int Groups, class Use>
inline void in_tiles(const Matrix& w, const Activations& in, const ReadThen& next, int begin, int end, Use&& use) {
  constexpr int kPanels = Groups == 1 ? 4 : Groups == 2 ? 2 : 1;
  constexpr unsigned kOfLast = Groups == 1 ? 0b1111 : Groups == 2 ? 0b1010 : 1u << (Groups - 1);
  const int last = in.rows - (Groups - 1) * kTileRows;
  const Tiles tiles(last, kOfLast);
  const auto ahead = [&](int p) { return p == next.end && next.then ? next.then : w.panel(p); };
  int p = begin;
  for (; p + kPanels <= end; p += kPanels) some_panels<kPanels, Groups>(w, p, in, last, ahead(p + kPanels), use);
  if constexpr (kPanels > 1)
    for (; p < end; ++p) some_panels<1, Groups>(w, p, in, last, ahead(p + 1), use);
}

template <class Use>
inline void multiply_in_tiles(const Matrix& w, const Activations& in, const ReadThen& next, int begin, int end, Use&& use) {
  static_assert(kPassRows <= 4 * kTileRows);
  if (in.rows <= kTileRows) in_tiles<1>(w, in, next, begin, end, use);
  else if (in.rows <= 2 * kTileRows) in_tiles<2>(w, in, next, begin, end, use);
  else if (in.rows <= 3 * kTileRows) in_tiles<3>(w, in, next, begin, end, use);
  else in_tiles<4>(w, in, next, begin, end, use);
}

}  // namespace
}  // namespace ppsd
