// Which ids may come next in an answer: a grammar's answer, or a test's.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace ppsd {

// A grammar gives up in the middle of an answer.
class MaskFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Asked by one stage, in its own thread. An id that it forbids may come all the same, as a draft that is wrong: what
// follows that is void, and all ids are allowed there.
class TokenMask {
 public:
  virtual ~TokenMask() = default;
  // The answer's ids from `start` on are `ids` now, those before are as they were. Row r of bits [rows][words of 32 ids],
  // lowest bit first: which ids may follow the answer without its last rows - 1 - r ids. Throws MaskFailed.
  virtual void fill(int start, const std::vector<int>& ids, int rows, uint32_t* bits) = 0;

  static int words(int vocab_size) { return (vocab_size + 31) / 32; }
};

}  // namespace ppsd
