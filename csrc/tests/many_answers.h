// Many answers in one loop with a small random model, asked for by several threads: each is plain decoding's.
#pragma once

#include <chrono>
#include <cstdint>

namespace ppsd::test {

// Answers until `end`, but at least some; how many.
int64_t many_answers(std::chrono::steady_clock::time_point end, uint64_t seed);

}  // namespace ppsd::test
