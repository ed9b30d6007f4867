// What packing has made, in a file: mapped the next time, read-only, so that nothing is packed and processes share the pages.
// ppsd_rt/cpu/packed.py says whose weights it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "memory.h"
#include "team.h"

namespace ppsd {

struct NotPacked : std::runtime_error {   // the file is damaged, or of another model
  using std::runtime_error::runtime_error;
};

// A header of kHeader bytes and, where the next huge page begins, the memory as it lies.
struct PackedFile {
  static constexpr size_t kHeader = 4096;
  int file = -1;            // descriptor; -1: there is none
  uint64_t checksum = 0;    // that the memory is to have

  bool present() const { return file >= 0; }
  Memory map(size_t bytes, Team* team) const;   // throws NotPacked
};

// Any changed byte changes it. Reading is all that takes time: by all members, and a mapped page is there afterwards.
uint64_t checksum_of(const uint8_t* data, size_t bytes, Team* team);

// Writes the memory behind the header, and to the disk, by a thread that gives way to all others: an answer has the cores until it
// ends. Returns the checksum. Throws std::system_error.
uint64_t write_packed(int file, const Memory& memory);

void write_all(int file, const void* data, size_t bytes, int64_t at);   // throws std::system_error

}  // namespace ppsd
