// What a pass may hold. Checked wherever one is put together, in every build: its rows go into buffers of fixed size.
#pragma once

#include <stdexcept>
#include <string>

namespace ppsd {

// Throws std::logic_error: no input leads here, but a mistake of this library.
inline void check_bound(size_t count, size_t most, const char* what) {
  if (count > most)
    throw std::logic_error("a pass has " + std::to_string(count) + " " + what + ", and there is room for " + std::to_string(most));
}

}  // namespace ppsd
