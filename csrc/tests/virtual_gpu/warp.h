// What runs: warps of 32 lanes in CTAs of a grid, and the memory that they see.
#pragma once

#include <memory>
#include <random>

#include "memory.h"
#include "ptx.h"

namespace virtual_gpu {

struct Machine;

// One launch of a kernel.
struct Grid {
  const Kernel* kernel = nullptr;
  uint32_t size[3] = {1, 1, 1};
  std::vector<uint64_t> parameters;
  std::vector<Range> ranges;      // what its pointers point to
  uint32_t id = 0;                // stream and number in it: see Order
  bool dependent = false;         // launched before the grid ahead has ended
  Grid* ahead = nullptr;          // while that is so
  Order known;                    // what all its CTAs see from the beginning, if not `dependent`
  Order after;                    // what whoever comes after it sees
  std::vector<Seen> seen, seen_after;   // likewise of CTAs that have not ended: what was acquired of them
  int shared = 0;                 // bytes of each CTA

  int begun = 0, ended = 0, triggered = 0;   // CTAs
  std::vector<int> order;                    // in which they begin
  int ctas() const { return int(order.size()); }
};

struct Cta;

// Lanes of a warp that are at the same instruction.
struct Group {
  int at = 0;
  uint32_t lanes = 0;
  bool blocked = false;   // at an instruction that takes other lanes too
};

struct Copy {   // cp.async
  uint64_t from;
  uint32_t to;
  int bytes, whole;
  int lane, commit;
};

struct Product {   // wgmma.mma_async
  const Instruction* its;
  int commit;
  std::vector<uint64_t> descriptors;   // of A, if it is in shared memory, and B
  std::vector<uint32_t> rows;          // A, if it is in registers
  bool accumulates;
};

struct alignas(64) Warp {
  Cta* cta = nullptr;
  uint32_t* registers = nullptr;
  std::vector<uint32_t> predicates;
  int number = 0;
  uint32_t alive = ~0u, active = 0;   // lanes; active: those that execute the instruction
  std::vector<Group> groups;
  int at = 0;                         // the instruction
  int barrier = -1;                   // it waits at: the instruction, or -1
  bool waiting = false;               // for the grid ahead
  bool waited = false;                // or need not
  std::vector<Seen> acquired;         // since the last barrier
  int copies_committed = 0, products_committed = 0;
  std::vector<Copy> copies;
  std::vector<Product> products;
  std::map<int, std::vector<uint32_t>> sums;   // of products under way, by the place of the first register

  uint32_t* at_place(const Operand& o);
  template <class T> T* lanes(const Operand& o) { return reinterpret_cast<T*>(at_place(o)); }
  uint32_t& predicate(const Operand& o) { return predicates[size_t(o.place)]; }
  [[noreturn]] void fail(const std::string& what) const;
};

struct Cta {
  Grid* grid = nullptr;
  Machine* machine = nullptr;
  int number = 0;
  uint32_t place[3] = {0, 0, 0};
  std::vector<Warp> warps;
  std::vector<uint32_t> registers;   // of all warps
  Shared shared;
  uint32_t epoch = 1, shared_epoch = 0;   // barriers so far: its own; of the machine, for `shared`
  uint32_t store_epoch = 0, storing = 0;  // in which threads have stored last; which one, or kSeveral
  static constexpr uint32_t kSeveral = ~0u;
  int left = 0, arrived = 0;         // warps that have not ended; at the barrier
  int triggers = 0;                  // warps that have triggered
  Order known;
  std::vector<Seen> seen;            // of CTAs that may not have ended
  int threads() const { return grid->kernel->threads; }
};

inline uint32_t* Warp::at_place(const Operand& o) {
  if (!o.constant) return registers + size_t(o.place) * kLanes;
  const auto& pool = cta->grid->kernel->constants;
  return const_cast<uint32_t*>(pool.data() + pool.size()) + ptrdiff_t(o.place) * kLanes;
}

}  // namespace virtual_gpu
