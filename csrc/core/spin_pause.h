// What a thread does between two looks at what it waits for: nothing, for some tens of cycles.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace ppsd {

inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" : : : "memory");   // "yield" takes no time on most of these processors
#endif
}

}  // namespace ppsd
