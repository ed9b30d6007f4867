// The CPU library with a small random model: every format, kernel and carrier gives plain decoding's answer.
#pragma once

#include "check.h"

namespace ppsd::test {

// Until it is enough, but at least one of each format and kernel.
Played cpu_answers(const Enough& enough, uint64_t seed);

}  // namespace ppsd::test
