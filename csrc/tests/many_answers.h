// Many answers in one loop with a small random model, asked for by several threads: each is plain decoding's.
#pragma once

#include "check.h"

namespace ppsd::test {

// Until it is enough, but at least some.
Played many_answers(const Enough& enough, uint64_t seed);

}  // namespace ppsd::test
