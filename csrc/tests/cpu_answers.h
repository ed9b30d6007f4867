// The CPU library with a small random model: every format, kernel and carrier gives plain decoding's answer.
#pragma once

#include <chrono>
#include <cstdint>

namespace ppsd::test {

// Answers until `end`, but at least one of each format and kernel; how many.
int64_t cpu_answers(std::chrono::steady_clock::time_point end, uint64_t seed);

}  // namespace ppsd::test
