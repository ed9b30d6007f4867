// Weights as GGUF files hold them: blocks of some values with common scales, decoded to float32.
#pragma once

#include <cstdint>
#include <string>

namespace ppsd {

// 32 weights of four bits at even distances: scale * code - minimum, codes 0 to 15. Code i is in the low half of byte i, i + 16
// in the high one.
struct FourBits {
  float scale, minimum;
  uint8_t codes[16];
};

constexpr int kMostFourBits = 8;   // of these in one of a file's blocks

// 256 weights of six bits: scale (a float16) * scales[i / 16] * (codes[i] - 32), codes 0 to 63.
struct SixBits {
  uint16_t scale;
  int8_t scales[16];
  uint8_t codes[256];
};

struct BlockType {
  const char* name;                                     // llama.cpp's
  int values, bytes;                                    // of a block
  void (*decode)(const uint8_t* block, float* values);
  void (*four_bits)(const uint8_t* block, FourBits* out) = nullptr;   // [values / 32]; null: the type is another
  void (*six_bits)(const uint8_t* block, SixBits* out) = nullptr;     // the same
};

const BlockType* block_type(const std::string& name);   // null: there is no such type

}  // namespace ppsd
