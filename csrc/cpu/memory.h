// Aligned, zeroed memory, on huge pages where the system gives them (weights are streamed: fewer pages, fewer misses); or a
// file's, read-only, whose pages all processes share that map it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace ppsd {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    if (bytes >= (size_t(4) << 20)) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  Memory(int file, size_t offset, size_t bytes) : bytes_(bytes) {   // offset: of a page. Throws std::bad_alloc
    data_ = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, off_t(offset));
    if (data_ == MAP_FAILED) {
      data_ = nullptr;
      throw std::bad_alloc();
    }
  }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  template <class T = uint8_t>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ppsd
