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
    const auto place = out.place(r, out.width / kBlock);
    const size_t at = place.at + size_t(b) * place.step;
    out.scales[at] = largest / 127.0f;
    const auto halves = out.place(r, out.width / kSixes);
    out.starts[halves.at + size_t(2 * b) * halves.step] = Simd::start_of(a);
    out.starts[halves.at + size_t(2 * b + 1) * halves.step] = Simd::start_of(c);
    const int32_t sum = Simd::sum_lanes(Simd::addi(a, c));
    out.corrections[at] = -Simd::kWeightOffset * sum;
    out.minus_sums[at] = -out.scales[at] * float(sum);
  }
  if (out.by_block) {
    std::memcpy(out.words + (size_t(b) * out.rows + r) * count, words, size_t(count) * 4);
    return;
  }
  const auto place = out.place(r, out.width / kBlock * count);
  uint32_t* to = out.words + place.at + size_t(b) * count * place.step;
  if (place.step == 1) std::memcpy(to, words, size_t(count) * 4);
  else for (int i = 0; i < count; ++i, to += place.step) *to = words[i];
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

// Where a code of int4 lies in its block's bytes: input k of the panel's output l. Low half: k < 16.
inline int code_at(int k, int l) { return kInt4Codes + k % 16 / 4 * 64 + l * 4 + k % 4; }

struct Line {   // that weights of a block lie near: scale * code - minimum
  float scale, minimum;
};

inline I codes_on(V x, Line line) {
  const V inverse = Simd::set1(line.scale != 0.0f ? 1.0f / line.scale : 0.0f);
  const V code = Simd::mul(Simd::add(x, Simd::set1(line.minimum)), inverse);
  return Simd::to_int(Simd::min(Simd::max(code, Simd::zero()), Simd::set1(15.0f)));
}

// Some lines are tried: the codes that the weights have on each, then the line that fits these codes best. The one with the
// least squared error is kept, errors weighed by the importance of the inputs (null: all alike).
inline Line fit_int4(V first, V second, const float* importance) {
  const float most = Simd::max_lanes(Simd::max(first, second));
  const float least = -Simd::max_lanes(Simd::max(Simd::sub(Simd::zero(), first), Simd::sub(Simd::zero(), second)));
  Line best{0.0f, -least};
  if (!(most > least)) return best;   // all alike, or not finite
  const V one = Simd::set1(1.0f);
  const V heavy = importance ? Simd::load(importance) : one, heavy_second = importance ? Simd::load(importance + 16) : one;
  const float weight = Simd::sum_lanes(Simd::add(heavy, heavy_second));
  const auto mean = [&](V a, V c) { return Simd::sum_lanes(Simd::fma(heavy, a, Simd::mul(heavy_second, c))) / weight; };
  const float middle = mean(first, second);
  const V x = Simd::sub(first, Simd::set1(middle)), y = Simd::sub(second, Simd::set1(middle));
  float most_explained = -1.0f;   // of the mean square around the middle
  for (float steps : {13.4f, 14.2f, 15.0f, 15.8f, 16.8f, 18.0f}) {   // from the least weight to the largest
    for (float start : {-0.4f, 0.0f, 0.4f}) {
      const float step = (most - least) / steps, low = 0.5f * (most + least) + (start - 7.5f) * step;
      const V a = Simd::to_float(codes_on(first, {step, -low})), c = Simd::to_float(codes_on(second, {step, -low}));
      const float code = mean(a, c);
      const V p = Simd::sub(a, Simd::set1(code)), q = Simd::sub(c, Simd::set1(code));
      const float product = mean(Simd::mul(x, p), Simd::mul(y, q)), square = mean(Simd::mul(p, p), Simd::mul(q, q));
      const float explained = square > 0.0f ? product / square * product : 0.0f;
      if (explained <= most_explained) continue;
      most_explained = explained;
      const float scale = square > 0.0f ? product / square : 0.0f;
      best = {scale, scale * code - middle};
    }
  }
  return best;
}

inline void pack_block_int4(uint8_t* block, int l, V first, V second, const float* importance) {
  const Line wanted = fit_int4(first, second, importance);
  uint16_t* scales = reinterpret_cast<uint16_t*>(block);
  const uint16_t scale = scales[l] = nearest_half(wanted.scale), minimum = scales[kPanel + l] = nearest_half(wanted.minimum);
  const Line line{half_to_float(scale), half_to_float(minimum)};
  int32_t bytes[kBlock / 2];
  Simd::storei(bytes, Simd::bit_or(codes_on(first, line), Simd::shift_left(codes_on(second, line), 4)));
  for (int k = 0; k < kBlock / 2; ++k) block[code_at(k, l)] = uint8_t(bytes[k]);
}

// A row of a checkpoint into a panel's output l; null: zeros. False: one of the weights is no finite number.
bool pack_output(const Matrix& out, const void* row, Stored stored, const float* importance, int output) {
  const int p = output / kPanel, l = output % kPanel;
  const Format format = out.format_of(p);
  uint8_t* panel = out.panel(p);
  V nothing = Simd::zero();   // stays so, as long as all weights are finite
  float block[kBlock];
  for (int b = 0; b < out.inputs / kBlock; ++b) {
    const V first = row ? load_stored(row, stored, b * kBlock) : Simd::zero();
    const V second = row ? load_stored(row, stored, b * kBlock + 16) : Simd::zero();
    nothing = Simd::add(nothing, Simd::add(Simd::sub(first, first), Simd::sub(second, second)));
    if (format == Format::kInt4) {
      pack_block_int4(panel + size_t(b) * kInt4Block, l, first, second, importance ? importance + b * kBlock : nullptr);
    } else if (format == Format::kInt8) {
      const float largest = Simd::max_lanes(Simd::max(Simd::abs(first), Simd::abs(second)));
      const uint16_t half = nearest_half(largest / 127.0f);
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
  return Simd::sum_lanes(nothing) == 0.0f;
}

bool pack(const Matrix& out, const Source& source, int begin, int end) {
  bool finite = true;
  for (int output = begin * kPanel; output < end * kPanel; ++output) {
    const void* row = output < out.outputs ? source.rows[output].data : nullptr;
    finite = pack_output(out, row, source.stored, source.importance, output) && finite;
  }
  return finite;
}

void unpack(const Matrix& in, int output, float* row) {
  const Format format = in.format_of(output / kPanel);
  const uint8_t* panel = in.panel(output / kPanel);
  const int l = output % kPanel;
  for (int i = 0; i < in.inputs; ++i) {
    const int b = i / kBlock, k = i % kBlock;
    if (format == Format::kInt4) {
      const uint8_t* block = panel + size_t(b) * kInt4Block;
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(block);
      const int code = block[code_at(k, l)] >> (k < 16 ? 0 : 4) & 15;
      row[i] = half_to_float(scales[l]) * float(code) - half_to_float(scales[kPanel + l]);
    } else if (format == Format::kInt6) {
      const uint8_t* block = panel + i / kInt6Inputs * size_t(kInt6Block);
      const int sixteen = i % kInt6Inputs / kSixes, word = i % kSixes / 4;
      const uint8_t* codes = block + kInt6Codes + sixteen * kSixesBytes + l * 4 + i % 4;
      const int code = (codes[word / 2 * 64] >> word % 2 * 4 & 15) | (codes[128] >> 2 * word & 3) << 4;
      const float scale = half_to_float(reinterpret_cast<const uint16_t*>(block)[l]);
      row[i] = scale * float(int8_t(block[kInt6Scales + sixteen * kPanel + l])) * float(code - 32);
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
