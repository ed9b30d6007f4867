// Sixteen-bit floats, one at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ppsd {

static inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static inline float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

static inline uint16_t float_to_bf16(float x) {   // to nearest even; NaN stays NaN
  const uint32_t bits = float_to_bits(x);
  return x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FF;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 0x1p-24f;
  if (exponent == 31) return bits_to_float(sign | 0x7F800000u | (mantissa << 13));
  return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

static inline uint16_t float_to_half(float x) {   // to nearest even; x within the range of halves
  uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7FFFFFFF;
  if (bits < 0x38800000)   // below the normal halves: in units of 2^-24
    return uint16_t(sign | uint32_t(std::nearbyint(bits_to_float(bits) * 0x1p24f)));
  return uint16_t(sign | ((bits + 0x0FFF + ((bits >> 13) & 1) - 0x38000000) >> 13));
}

static inline uint16_t nearest_half(float x) {   // of any size
  return float_to_half(x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x);
}

}  // namespace ppsd
