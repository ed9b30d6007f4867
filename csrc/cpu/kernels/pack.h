// Weights into panels, activations into blocks, and back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vector_math.h"

namespace ppsd {
namespace {

inline V load_stored(const void* row, Stored stored, int i) {
  switch (stored) {
    case Stored::kFp16: return Simd::load_f16(static_cast<const uint16_t*>(row) + i);
    case Stored::kBf16: return Simd::load_bf16(static_cast<const uint16_t*>(row) + i);
    case Stored::kFp32: case Stored::kInt8: break;
  }
  return Simd::load(static_cast<const float*>(row) + i);
}

// -- activations -------------------------------------------------------------------------------------------------------

// 32 values of a row into the activations' format: block b of row r.
inline void put_block(const Activations& out, int r, int b, V first, V second) {
  alignas(64) uint32_t words[kBlock];
  int count = kBlock;
  if (out.format == Format::kFp32) {
    Simd::store(reinterpret_cast<float*>(words), first);
    Simd::store(reinterpret_cast<float*>(words) + 16, second);
  } else if (out.format == Format::kBf16) {
    alignas(64) uint16_t halves[kBlock];
    Simd::store_bf16(halves, first);
    Simd::store_bf16(halves + 16, second);
    if constexpr (Simd::kBf16Words == 1) {
      std::memcpy(words, halves, sizeof halves);
      count /= 2;
    } else {
      Simd::store(reinterpret_cast<float*>(words), Simd::load_bf16(halves));
      Simd::store(reinterpret_cast<float*>(words) + 16, Simd::load_bf16(halves + 16));
    }
  } else {
    const float largest = Simd::max_lanes(Simd::max(Simd::abs(first), Simd::abs(second)));
    const V inverse = Simd::set1(largest > 0.0f ? 127.0f / largest : 0.0f);
    const I a = Simd::to_int(Simd::mul(first, inverse)), c = Simd::to_int(Simd::mul(second, inverse));
    Simd::store_i8(reinterpret_cast<int8_t*>(words), a);
    Simd::store_i8(reinterpret_cast<int8_t*>(words) + 16, c);
    count /= 4;
    const size_t at = size_t(b) * out.rows + r;
    out.scales[at] = largest / 127.0f;
    out.corrections[at] = -Simd::kWeightOffset * Simd::sum_lanes(Simd::addi(a, c));
  }
  if (out.by_block) {
    std::memcpy(out.words + (size_t(b) * out.rows + r) * count, words, size_t(count) * 4);
    return;
  }
  uint32_t* to = out.words + size_t(b) * count * out.rows + r;
  if (out.rows == 1) std::memcpy(to, words, size_t(count) * 4);
  else for (int i = 0; i < count; ++i, to += out.rows) *to = words[i];
}

void normalize(const float* x, int rows, const float* weight, float eps, const Activations& out) {
  const int width = out.width;
  for (int r = 0; r < rows; ++r, x += width) {
    V squares = Simd::zero();
    for (int i = 0; i < width; i += 16) {
      const V v = Simd::load(x + i);
      squares = Simd::fma(v, v, squares);
    }
    const V inverse = Simd::set1(1.0f / std::sqrt(Simd::sum_lanes(squares) / float(width) + eps));
    for (int i = 0; i < width; i += kBlock) {
      const V a = Simd::mul(Simd::mul(Simd::load(x + i), inverse), Simd::load(weight + i));
      const V c = Simd::mul(Simd::mul(Simd::load(x + i + 16), inverse), Simd::load(weight + i + 16));
      put_block(out, r, i / kBlock, a, c);
    }
  }
}

void convert(const float* x, int rows, const Activations& out) {
  for (int r = 0; r < rows; ++r, x += out.width)
    for (int i = 0; i < out.width; i += kBlock) put_block(out, r, i / kBlock, Simd::load(x + i), Simd::load(x + i + 16));
}

// -- packing -----------------------------------------------------------------------------------------------------------

// How many of the borders between kLevels lie below each lane, and the level that is nearest to it.
inline I nearest_index(V x) {
  I index = Simd::seti(0);
  for (int i = 0; i < 15; ++i) {
    const auto above = Simd::less(Simd::set1(0.5f * float(kLevels[i] + kLevels[i + 1])), x);
    index = Simd::addi(index, Simd::select_i(above, Simd::seti(1), Simd::seti(0)));
  }
  return index;
}
inline V nearest_level(V x) {
  V level = Simd::set1(kLevels[0]);
  for (int i = 0; i < 15; ++i) {
    const auto above = Simd::less(Simd::set1(0.5f * float(kLevels[i] + kLevels[i + 1])), x);
    level = Simd::add(level, Simd::select(above, Simd::set1(float(kLevels[i + 1] - kLevels[i])), Simd::zero()));
  }
  return level;
}

// Some scales are tried: the levels that the weights go to under each, then the scale that fits these levels best. The one
// with the least squared error is kept, errors weighed by the importance of the inputs (null: all alike).
inline float scale_int4(V first, V second, const float* importance) {
  const V one = Simd::set1(1.0f);
  const V heavy = importance ? Simd::load(importance) : one, heavy_second = importance ? Simd::load(importance + 16) : one;
  const float most = Simd::max_lanes(Simd::max(first, second));
  const float least = -Simd::max_lanes(Simd::max(Simd::sub(Simd::zero(), first), Simd::sub(Simd::zero(), second)));
  const float largest = -least > most ? least : most;
  float best = 0.0f, most_explained = 0.0f;   // of the sum of squares
  for (float factor : {0.85f, 0.95f, 1.05f}) {
    const V inverse = Simd::set1(-127.0f / (largest * factor));
    const V a = nearest_level(Simd::mul(first, inverse)), c = nearest_level(Simd::mul(second, inverse));
    const V weighed = Simd::mul(heavy, a), weighed_second = Simd::mul(heavy_second, c);
    const float product = Simd::sum_lanes(Simd::fma(first, weighed, Simd::mul(second, weighed_second)));
    const float square = Simd::sum_lanes(Simd::fma(a, weighed, Simd::mul(c, weighed_second)));   // no level is 0
    const float explained = product / square * product;
    if (explained > most_explained) best = product / square, most_explained = explained;
  }
  return best;
}

inline void pack_block_int4(const Matrix& out, uint8_t* panel, int b, int l, V first, V second, const float* importance) {
  const float wanted = scale_int4(first, second, importance ? importance + b * kBlock : nullptr);
  const uint16_t half = float_to_half(std::max(-65504.0f, std::min(wanted, 65504.0f)));
  reinterpret_cast<uint16_t*>(panel)[b * kPanel + l] = half;
  const float scale = half_to_float(half);
  const V inverse = Simd::set1(scale != 0.0f ? 1.0f / scale : 0.0f);
  const I low = nearest_index(Simd::mul(first, inverse)), high = nearest_index(Simd::mul(second, inverse));
  int32_t bytes[kBlock / 2];
  Simd::storei(bytes, Simd::bit_or(low, Simd::shift_left(high, 4)));
  uint8_t* weights = panel + out.scale_bytes() + size_t(b) * kBlock * kPanel / 2;
  for (int i = 0; i < kBlock / 2; ++i) weights[(i / 4) * 64 + l * 4 + i % 4] = uint8_t(bytes[i]);
}

bool pack_panel(const Matrix& out, const Source& source, int p) {
  const Format format = out.format_of(p);
  const Stored stored = source.stored;
  uint8_t* panel = out.panel(p);
  V nothing = Simd::zero();   // stays so, as long as all weights are finite
  for (int l = 0; l < kPanel; ++l) {
    const int output = p * kPanel + l;
    const void* row = output < out.outputs ? source.rows[output].data : nullptr;
    float block[kBlock];
    for (int b = 0; b < out.inputs / kBlock; ++b) {
      const V first = row ? load_stored(row, stored, b * kBlock) : Simd::zero();
      const V second = row ? load_stored(row, stored, b * kBlock + 16) : Simd::zero();
      nothing = Simd::add(nothing, Simd::add(Simd::sub(first, first), Simd::sub(second, second)));
      if (format == Format::kInt4) {
        pack_block_int4(out, panel, b, l, first, second, source.importance);
      } else if (format == Format::kInt8) {
        const float largest = Simd::max_lanes(Simd::max(Simd::abs(first), Simd::abs(second)));
        const uint16_t half = float_to_half(std::min(largest / 127.0f, 65504.0f));
        reinterpret_cast<uint16_t*>(panel)[b * kPanel + l] = half;
        const float scale = half_to_float(half);
        // The scale is rounded first, so a weight may come to 127.06: it is cut to what a byte holds.
        const V inverse = Simd::set1(scale > 0.0f ? 1.0f / scale : 0.0f), most = Simd::set1(127.0f);
        const V least = Simd::set1(-127.0f);
        int8_t values[kBlock];
        Simd::store_i8(values, Simd::to_int(Simd::min(Simd::max(Simd::mul(first, inverse), least), most)));
        Simd::store_i8(values + 16, Simd::to_int(Simd::min(Simd::max(Simd::mul(second, inverse), least), most)));
        uint8_t* weights = panel + out.scale_bytes() + size_t(b) * kBlock * kPanel;
        for (int i = 0; i < kBlock; ++i)
          weights[(i / 4) * 64 + l * 4 + i % 4] = uint8_t(values[i] + Simd::kWeightOffset);
      } else if (format == Format::kBf16) {
        uint16_t values[kBlock];
        Simd::store_bf16(values, first);
        Simd::store_bf16(values + 16, second);
        uint16_t* weights = reinterpret_cast<uint16_t*>(panel) + size_t(b) * kBlock * kPanel;
        for (int i = 0; i < kBlock; ++i) weights[(i / 2) * 32 + l * 2 + i % 2] = values[i];
      } else {
        Simd::store(block, first);
        Simd::store(block + 16, second);
        float* weights = reinterpret_cast<float*>(panel) + size_t(b) * kBlock * kPanel;
        for (int i = 0; i < kBlock; ++i) weights[i * kPanel + l] = block[i];
      }
    }
  }
  return Simd::sum_lanes(nothing) == 0.0f;
}

bool pack(const Matrix& out, const Source& source, int begin, int end) {
  bool finite = true;
  for (int p = begin; p < end; ++p) finite = pack_panel(out, source, p) && finite;
  return finite;
}

void unpack(const Matrix& in, int output, float* row) {
  const Format format = in.format_of(output / kPanel);
  const uint8_t* panel = in.panel(output / kPanel);
  const int l = output % kPanel;
  for (int i = 0; i < in.inputs; ++i) {
    const int b = i / kBlock, k = i % kBlock;
    if (format == Format::kInt4) {
      const uint8_t byte = panel[in.scale_bytes() + size_t(b) * kBlock * kPanel / 2 + (k % 16 / 4) * 64 + l * 4 + k % 4];
      const float scale = half_to_float(reinterpret_cast<const uint16_t*>(panel)[b * kPanel + l]);
      row[i] = scale * float(kLevels[k < 16 ? byte & 15 : byte >> 4]);
    } else if (format == Format::kInt8) {
      const uint8_t byte = panel[in.scale_bytes() + size_t(b) * kBlock * kPanel + (k / 4) * 64 + l * 4 + k % 4];
      const float scale = half_to_float(reinterpret_cast<const uint16_t*>(panel)[b * kPanel + l]);
      row[i] = scale * float(int8_t(byte - Simd::kWeightOffset));
    } else if (format == Format::kBf16) {
      const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t*>(panel)[(i / 2) * 32 + l * 2 + i % 2]) << 16;
      std::memcpy(&row[i], &bits, 4);
    } else {
      row[i] = reinterpret_cast<const float*>(panel)[i * kPanel + l];
    }
  }
}

}  // namespace
}  // namespace ppsd
