// A language model whose next token is a hash of the text.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/noise.h"

namespace ppsd {

struct ToyModel {
  uint64_t seed = 0;
  int vocabulary = 1000;
  bool forgets = false;   // the next token depends on the last one alone: texts repeat themselves

  uint64_t empty() const { return mix(seed); }
  uint64_t after(uint64_t text, int token) const { return mix((forgets ? seed : text) + uint64_t(token) + 1); }
  int next(uint64_t text) const { return int(text % uint64_t(vocabulary)); }

  // What plain decoding gives: the prompt and `count` tokens.
  std::vector<int> plain(std::vector<int> tokens, int count) const {
    uint64_t text = empty();
    for (int token : tokens) text = after(text, token);
    for (int i = 0; i < count; ++i) {
      tokens.push_back(next(text));
      text = after(text, tokens.back());
    }
    return tokens;
  }

 private:
  static uint64_t mix(uint64_t x) {   // splitmix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
};

}  // namespace ppsd
