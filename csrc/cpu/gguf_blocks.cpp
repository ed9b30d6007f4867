// What the bytes mean: llama.cpp, ggml/src/ggml-common.h (the structs) and ggml-quants.c (dequantize_row_*). Products and
// sums are rounded one by one, in that order, so that every bit is that of the `gguf` package, which tests compare.
#include "gguf_blocks.h"

#include "half.h"

namespace ppsd {
namespace {

constexpr int kSuper = 256;   // values of a block of the K types
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

float half_at(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  return half_to_float(half);
}

int bit_of(const uint8_t* bits, int i) { return bits[i / 8] >> (i % 8) & 1; }

// -- 32 values: the first half in the low four bits of 16 bytes, the second in the high ones ---------------------------

void decode_q4_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * float((b[2 + i] & 15) - 8);
    out[i + 16] = d * float((b[2 + i] >> 4) - 8);
  }
}

void decode_q4_1(const uint8_t* b, float* out) {
  const float d = half_at(b), least = half_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * float(b[4 + i] & 15) + least;
    out[i + 16] = d * float(b[4 + i] >> 4) + least;
  }
}

void four_bits_q4_0(const uint8_t* b, FourBits* out) {
  *out = {half_at(b), 8.0f * half_at(b), {}};
  std::memcpy(out->codes, b + 2, 16);
}

void four_bits_q4_1(const uint8_t* b, FourBits* out) {
  *out = {half_at(b), -half_at(b + 2), {}};
  std::memcpy(out->codes, b + 4, 16);
}

void decode_q5_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * float(((b[6 + i] & 15) | bit_of(b + 2, i) << 4) - 16);
    out[i + 16] = d * float((b[6 + i] >> 4 | bit_of(b + 2, i + 16) << 4) - 16);
  }
}

void decode_q5_1(const uint8_t* b, float* out) {
  const float d = half_at(b), least = half_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * float((b[8 + i] & 15) | bit_of(b + 4, i) << 4) + least;
    out[i + 16] = d * float(b[8 + i] >> 4 | bit_of(b + 4, i + 16) << 4) + least;
  }
}

void decode_q8_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  for (int i = 0; i < 32; ++i) out[i] = d * float(int8_t(b[2 + i]));
}

void decode_iq4_nl(const uint8_t* b, float* out) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * float(kNonLinear[b[2 + i] & 15]);
    out[i + 16] = d * float(kNonLinear[b[2 + i] >> 4]);
  }
}

// -- 256 values, with a scale for 16 or 32 of them ---------------------------------------------------------------------

// The two bits of 256 values lie in turns in 64 bytes: 32 values in the lowest bits of 32 bytes, 32 in the next, ...
// Here each group of 16 values with one scale: where its bytes begin, and how far they are shifted.
struct Group {
  int half, shift, begin;   // of 128 values; of a byte's bits; of 32 bytes
  explicit Group(int group) : half(group / 8), shift(group % 8 / 2 * 2), begin(group % 2 * 16) {}
};

void decode_q2_k(const uint8_t* b, float* out) {
  const uint8_t *scales = b, *quants = b + 16;
  const float d = half_at(b + 80), dmin = half_at(b + 82);
  for (int group = 0; group < 16; ++group, out += 16) {
    const Group at(group);
    const float scale = d * float(scales[group] & 15), least = dmin * float(scales[group] >> 4);
    const uint8_t* from = quants + at.half * 32 + at.begin;
    for (int i = 0; i < 16; ++i) out[i] = scale * float(from[i] >> at.shift & 3) - least;
  }
}

void decode_q3_k(const uint8_t* b, float* out) {
  const uint8_t *high = b, *quants = b + 32, *scales = b + 96;
  const float d = half_at(b + 108);
  for (int group = 0; group < 16; ++group, out += 16) {
    const Group at(group);
    const int low = scales[group % 8] >> (group / 8 * 4) & 15, top = scales[8 + group % 4] >> (group / 4 * 2) & 3;
    const float scale = d * float((low | top << 4) - 32);
    const uint8_t *from = quants + at.half * 32 + at.begin, *bits = high + at.begin;
    for (int i = 0; i < 16; ++i)
      out[i] = scale * float(((from[i] >> at.shift & 3) | (bits[i] >> (group / 2) & 1) << 2) - 4);
  }
}

struct ScaleAndLeast {
  float scale, least;
};

// Of 32 values, six bits each: b[4..15] of the types Q4_K and Q5_K.
ScaleAndLeast scale_at(const uint8_t* b, int group) {
  const uint8_t* s = b + 4;
  const int low = group % 4;
  const int scale = group < 4 ? s[low] & 63 : (s[8 + low] & 15) | (s[low] >> 6) << 4;
  const int least = group < 4 ? s[4 + low] & 63 : s[8 + low] >> 4 | (s[4 + low] >> 6) << 4;
  return {half_at(b) * float(scale), half_at(b + 2) * float(least)};
}

void decode_q4_k(const uint8_t* b, float* out) {
  for (int group = 0; group < 8; ++group, out += 32) {
    const auto [scale, least] = scale_at(b, group);
    const uint8_t* quants = b + 16 + group / 2 * 32;
    for (int i = 0; i < 32; ++i) out[i] = scale * float(quants[i] >> (group % 2 * 4) & 15) - least;
  }
}

void four_bits_q4_k(const uint8_t* b, FourBits* out) {
  for (int group = 0; group < 8; ++group, ++out) {
    const auto [scale, least] = scale_at(b, group);
    *out = {scale, least, {}};
    const uint8_t* quants = b + 16 + group / 2 * 32;
    for (int i = 0; i < 16; ++i) {
      const int low = quants[i] >> (group % 2 * 4) & 15, high = quants[i + 16] >> (group % 2 * 4) & 15;
      out->codes[i] = uint8_t(low | high << 4);
    }
  }
}

void decode_q5_k(const uint8_t* b, float* out) {
  for (int group = 0; group < 8; ++group, out += 32) {
    const auto [scale, least] = scale_at(b, group);
    const uint8_t *high = b + 16, *quants = b + 48 + group / 2 * 32;
    for (int i = 0; i < 32; ++i)
      out[i] = scale * float((quants[i] >> (group % 2 * 4) & 15) | (high[i] >> group & 1) << 4) - least;
  }
}

void six_bits_q6_k(const uint8_t* b, SixBits* out) {
  const uint8_t *low = b, *high = b + 128;
  std::memcpy(out->scales, b + 192, 16);
  std::memcpy(&out->scale, b + 208, 2);
  uint8_t* codes = out->codes;
  for (int group = 0; group < 16; ++group, codes += 16) {
    const Group at(group);
    const uint8_t *four = low + at.half * 64 + at.shift % 4 * 16 + at.begin, *two = high + at.half * 32 + at.begin;
    for (int i = 0; i < 16; ++i)
      codes[i] = uint8_t((four[i] >> (at.shift / 4 * 4) & 15) | (two[i] >> at.shift & 3) << 4);
  }
}

void decode_q6_k(const uint8_t* b, float* out) {
  SixBits block;
  six_bits_q6_k(b, &block);
  for (int i = 0; i < kSuper; ++i)
    out[i] = half_to_float(block.scale) * float(block.scales[i / 16]) * float(block.codes[i] - 32);
}

void decode_iq4_xs(const uint8_t* b, float* out) {
  const float d = half_at(b);
  const int high = b[2] | b[3] << 8;
  for (int group = 0; group < 8; ++group, out += 32) {
    const int scale = (b[4 + group / 2] >> (group % 2 * 4) & 15) | (high >> (2 * group) & 3) << 4;
    const float common = d * float(scale - 32);
    const uint8_t* quants = b + 8 + group * 16;
    for (int i = 0; i < 16; ++i) {
      out[i] = common * float(kNonLinear[quants[i] & 15]);
      out[i + 16] = common * float(kNonLinear[quants[i] >> 4]);
    }
  }
}

constexpr BlockType kTypes[] = {
    {"Q4_0", 32, 18, decode_q4_0, four_bits_q4_0},
    {"Q4_1", 32, 20, decode_q4_1, four_bits_q4_1},
    {"Q5_0", 32, 22, decode_q5_0},
    {"Q5_1", 32, 24, decode_q5_1},
    {"Q8_0", 32, 34, decode_q8_0},
    {"IQ4_NL", 32, 18, decode_iq4_nl},
    {"Q2_K", kSuper, 84, decode_q2_k},
    {"Q3_K", kSuper, 110, decode_q3_k},
    {"Q4_K", kSuper, 144, decode_q4_k, four_bits_q4_k},
    {"Q5_K", kSuper, 176, decode_q5_k},
    {"Q6_K", kSuper, 210, decode_q6_k, nullptr, six_bits_q6_k},
    {"IQ4_XS", kSuper, 136, decode_iq4_xs},
};

}  // namespace

const BlockType* block_type(const std::string& name) {
  for (const BlockType& type : kTypes)
    if (name == type.name) return &type;
  return nullptr;
}

}  // namespace ppsd
