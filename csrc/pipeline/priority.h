// Threads that pass messages on must not wait behind one that computes for milliseconds on the same core.
#pragma once

namespace ppsd {

// Called by the computing thread of a process once its other threads run. Linux 6.12 and later: the others are given
// short time slices, so that they get the core at once when a message wakes them (they need it for microseconds).
// Elsewhere, or where it is not allowed, nothing changes. (Do not run ranks under a real-time policy: gloo's thread
// tries a lock again and again that a thread of lower priority holds, on a core that it does not leave.)
void prefer_messages();

}  // namespace ppsd
