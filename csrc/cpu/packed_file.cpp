#include "packed_file.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

namespace ppsd {
namespace {

// On huge pages: what is written in one piece where such a page begins is cached and mapped as one. Before it lies a hole.
constexpr size_t kPart = size_t(2) << 20, kBegin = kPart;

uint64_t mixed(uint64_t x) {   // the end of splitmix64
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// Parts are added up, each with its number in it, so that several threads can share them. Each step is a bijection of the lane:
// one changed word never goes unnoticed.
size_t parts_of(size_t bytes) { return (bytes + kPart - 1) / kPart; }

uint64_t checksum_of_part(const uint8_t* data, size_t bytes, size_t part) {
  constexpr size_t kLanes = 8;
  uint64_t lanes[kLanes], words[kLanes] = {};
  for (size_t l = 0; l < kLanes; ++l) lanes[l] = mixed(part * kLanes + l + 1);
  const size_t end = std::min((part + 1) * kPart, bytes);
  for (size_t at = part * kPart; at < end; at += sizeof(words)) {
    std::memcpy(words, data + at, std::min(sizeof(words), end - at));
    for (size_t l = 0; l < kLanes; ++l) lanes[l] = ((lanes[l] ^ words[l]) << 5 | (lanes[l] ^ words[l]) >> 59) + 0x9E3779B97F4A7C15u;
  }
  uint64_t sum = bytes;
  for (uint64_t lane : lanes) sum = mixed(sum ^ lane) + lane;
  return sum;
}

}  // namespace

void write_all(int file, const void* data, size_t bytes, int64_t at) {
  for (const auto* place = static_cast<const uint8_t*>(data); bytes > 0;) {
    const ssize_t done = pwrite(file, place, bytes, off_t(at));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw std::system_error(done < 0 ? errno : ENOSPC, std::generic_category());
    place += done, at += done, bytes -= size_t(done);
  }
}

uint64_t checksum_of(const uint8_t* data, size_t bytes, Team* team) {
  const size_t parts = parts_of(bytes);
  std::atomic<uint64_t> sum{0};
  std::atomic<size_t> next{0};
  const auto work = [&](int) {
    uint64_t own = 0;
    for (size_t part; (part = next.fetch_add(1)) < parts;) own += checksum_of_part(data, bytes, part);
    sum += own;
  };
  if (team != nullptr) team->run(work);
  else work(0);
  return sum;
}

Memory PackedFile::map(size_t bytes, Team* team) const {
  struct stat found;
  if (fstat(file, &found) != 0 || size_t(found.st_size) != kBegin + bytes) throw NotPacked("it has another size");
  Memory memory(file, kBegin, bytes);
#ifdef MADV_HUGEPAGE
  madvise(memory.as<>(), bytes, MADV_HUGEPAGE);
#endif
  if (checksum_of(memory.as<>(), bytes, team) != checksum) throw NotPacked("it is damaged");
  return memory;
}

uint64_t write_packed(int file, const Memory& memory) {
  uint64_t sum = 0;
  std::exception_ptr failure;
  std::thread([&] {
#ifdef SCHED_IDLE
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);
#endif
    try {
      const uint8_t* data = memory.as<>();
      for (size_t part = 0; part < parts_of(memory.bytes()); ++part) {
        write_all(file, data + part * kPart, std::min(kPart, memory.bytes() - part * kPart), int64_t(kBegin + part * kPart));
        sum += checksum_of_part(data, memory.bytes(), part);
      }
      if (fsync(file) != 0) throw std::system_error(errno, std::generic_category());
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
  return sum;
}

}  // namespace ppsd
