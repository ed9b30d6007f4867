// Weights as GGUF files hold them: blocks of some values with common scales, decoded to float32.
#pragma once

#include <cstdint>
#include <string>

namespace ppsd {

struct BlockType {
  const char* name;                                     // llama.cpp's
  int values, bytes;                                    // of a block
  void (*decode)(const uint8_t* block, float* values);
};

const BlockType* block_type(const std::string& name);   // null: there is no such type

}  // namespace ppsd
