// Loads, stores and atomics on global and shared memory, with everything that is checked at each of them.
#include <algorithm>
#include <cstring>

#include "machine.h"
#include "units.h"

namespace virtual_gpu {
namespace {

uint64_t address(Warp& w, const Operand& o, int lane) {
  return (o.bits == 64 ? w.lanes<uint64_t>(o)[lane] : w.lanes<uint32_t>(o)[lane]) + uint64_t(o.value);
}

uint64_t value_of(Warp& w, const Operand& o, int lane) {
  return o.bits == 64 ? w.lanes<uint64_t>(o)[lane] : w.lanes<uint32_t>(o)[lane];
}
void set_value(Warp& w, const Operand& o, int lane, uint64_t value) {
  if (o.kind == Operand::kSink) return;
  if (o.bits == 64) w.lanes<uint64_t>(o)[lane] = value;
  else w.lanes<uint32_t>(o)[lane] = uint32_t(value);
}

uint64_t read(uint64_t at, int size) {
  switch (size) {
    case 1: return *reinterpret_cast<const volatile uint8_t*>(at);
    case 2: return *reinterpret_cast<const volatile uint16_t*>(at);
    case 4: return *reinterpret_cast<const volatile uint32_t*>(at);
    default: return *reinterpret_cast<const volatile uint64_t*>(at);
  }
}
void write(uint64_t at, int size, uint64_t value) {
  switch (size) {
    case 1: *reinterpret_cast<volatile uint8_t*>(at) = uint8_t(value); break;
    case 2: *reinterpret_cast<volatile uint16_t*>(at) = uint16_t(value); break;
    case 4: *reinterpret_cast<volatile uint32_t*>(at) = uint32_t(value); break;
    default: *reinterpret_cast<volatile uint64_t*>(at) = value;
  }
}

// -- global memory -----------------------------------------------------------------------------------------------------

void check_bounds(Warp& w, const Instruction& i, uint64_t at, int bytes) {
  if (at % uint64_t(bytes)) w.fail("is not aligned to " + std::to_string(bytes) + " bytes");
  const auto mine = [&](const Range& range) { return i.origins == 0 || (range.parameters & i.origins) != 0; };
  const auto holds = [&](const Range& range) { return at >= range.begin && at + uint64_t(bytes) <= range.end; };
  for (const Range& range : w.cta->grid->ranges)
    if (holds(range) && mine(range)) return;
  if (i.origins == 0 && w.cta->grid->kernel->indirect)
    for (const Range& range : w.cta->machine->known_ranges())
      if (holds(range)) return;
  int64_t off = INT64_MAX;   // of the nearest argument before
  for (const Range& range : w.cta->grid->ranges)
    if (at >= range.begin && mine(range)) off = std::min(off, int64_t(at - range.end));
  w.fail("is out of bounds, " + (off == INT64_MAX ? "before its argument" : std::to_string(off) + " bytes behind an argument's end"));
}

uint32_t thread_of(const Warp& w, int lane) { return uint32_t(w.number * kLanes + lane); }

// Does this thread surely see that write?
bool sees(const Warp& w, const Written& its, uint32_t thread) {
  const Cta& cta = *w.cta;
  if (its.grid == cta.grid->id && its.cta == uint32_t(cta.number)) return its.thread == thread || its.epoch < cta.epoch;
  if (cta.known.has(its.grid)) return true;
  const auto covers = [&](const Seen& seen) {
    return seen.grid == its.grid && seen.cta == its.cta && (its.epoch < seen.epoch || (its.epoch == seen.epoch && its.thread == seen.thread));
  };
  return std::any_of(cta.seen.begin(), cta.seen.end(), covers) || std::any_of(w.acquired.begin(), w.acquired.end(), covers);
}

// A load of a part of a word that kernels have written. A volatile one is no exception: it reads memory, but of two
// writes that it is not ordered after it need not see the later one.
uint64_t weakly(Warp& w, uint64_t at, int size, int lane, uint64_t now) {
  Machine& machine = *w.cta->machine;
  const Written* its = machine.record.find(at / 4);
  if (its == nullptr) return now;
  if (!w.waited) w.fail("reads before the wait what a kernel has written");
  if (sees(w, *its, thread_of(w, lane))) return now;
  machine.race(w);
  if (!machine.chance(2)) return now;
  const uint32_t before = its->before >> (8 * (at % 4));
  return size == 4 ? before : before & ((1u << (8 * size)) - 1);
}

void load_global(Warp& w, const Instruction& i) {
  Machine& machine = *w.cta->machine;
  const int bytes = i.size * i.count;
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.active >> l & 1)) continue;
    const uint64_t at = address(w, i.from[0], l);
    check_bounds(w, i, at, bytes);
    uint64_t values[8];
    for (int n = 0; n < i.count; ++n) {
      const uint64_t its = at + uint64_t(n * i.size);
      values[n] = read(its, i.size);
      if (machine.audits) {
        if (i.size == 8) {   // two words
          const uint64_t first = weakly(w, its, 4, l, values[n] & 0xFFFFFFFF), second = weakly(w, its + 4, 4, l, values[n] >> 32);
          values[n] = first | second << 32;
        } else {
          values[n] = weakly(w, its, i.size, l, values[n]);
        }
      }
    }
    for (int n = 0; n < i.count; ++n) set_value(w, i.to[size_t(n)], l, values[n]);
  }
}

// What a thread writes, word by word.
void note_write(Warp& w, uint64_t at, int size, int lane) {
  Machine& machine = *w.cta->machine;
  if (!w.waited) w.fail("stores before it has waited for the kernel ahead");
  if (!machine.audits) return;
  Cta& cta = *w.cta;
  const uint32_t thread = thread_of(w, lane);
  if (cta.store_epoch != cta.epoch) cta.storing = thread;
  else if (cta.storing != thread) cta.storing = Cta::kSeveral;
  cta.store_epoch = cta.epoch;
  for (uint64_t word = at / 4; word <= (at + uint64_t(size) - 1) / 4; ++word) {
    Written& its = machine.record.make(word);
    // Neighbours that share a word: as long as the old one is unseen, so is the word's old value.
    its.before = uint32_t(read(word * 4, 4));
    its.grid = cta.grid->id, its.cta = uint32_t(cta.number), its.epoch = cta.epoch, its.thread = thread;
  }
}

// All that this thread has seen, and what its CTA had written before the last barrier, is seen by whoever acquires.
void release(Warp& w, uint64_t at, int lane) {
  Cta& cta = *w.cta;
  if (cta.store_epoch == cta.epoch && cta.storing != thread_of(w, lane)) w.fail("releases before a barrier has ordered what other threads have stored");
  Record::Release& its = cta.machine->record.releases[at];
  its.known.merge(cta.known);
  merge(its.seen, cta.seen, its.known);
  merge(its.seen, w.acquired, its.known);
  add(its.seen, {cta.grid->id, uint32_t(cta.number), cta.epoch, thread_of(w, lane)});
}
void acquire(Warp& w, uint64_t at) {
  Cta& cta = *w.cta;
  const auto found = cta.machine->record.releases.find(at);
  if (found == cta.machine->record.releases.end()) return;
  cta.known.merge(found->second.known);
  merge(w.acquired, found->second.seen, cta.known);
}

void store_global(Warp& w, const Instruction& i) {
  const int bytes = i.size * i.count;
  for (int l = 0; l < kLanes; ++l) {   // all lanes release what was before any of them stores
    if (!(w.active >> l & 1)) continue;
    check_bounds(w, i, address(w, i.from[0], l), bytes);
    if (i.option == kReleases) release(w, address(w, i.from[0], l), l), __atomic_thread_fence(__ATOMIC_RELEASE);
  }
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.active >> l & 1)) continue;
    const uint64_t at = address(w, i.from[0], l);
    note_write(w, at, bytes, l);
    for (int n = 0; n < i.count; ++n) write(at + uint64_t(n * i.size), i.size, value_of(w, i.from[size_t(n) + 1], l));
  }
}

enum { kAdd = 16, kExchange = 32, kCompare = 48 };

void atomic(Warp& w, const Instruction& i) {
  const int first = int(w.cta->machine->number(kLanes));   // lanes take their turns in any order
  for (int n = 0; n < kLanes; ++n) {
    const int l = (first + n) % kLanes;
    if (!(w.active >> l & 1)) continue;
    const uint64_t at = address(w, i.from[0], l);
    check_bounds(w, i, at, i.size);
    if (!w.waited) w.fail("stores before it has waited for the kernel ahead");
    auto* memory = reinterpret_cast<uint32_t*>(at);
    const uint32_t value = uint32_t(value_of(w, i.from[1], l));
    uint32_t old = 0;
    bool stored = true;
    if (i.option & kAcquires) acquire(w, at);
    if (i.option & kReleases) release(w, at, l);
    switch (i.option & ~(kAcquires | kReleases)) {
      case kAdd: old = __atomic_fetch_add(memory, value, __ATOMIC_SEQ_CST); break;
      case kExchange: old = __atomic_exchange_n(memory, value, __ATOMIC_SEQ_CST); break;
      default:
        old = value;
        stored = __atomic_compare_exchange_n(memory, &old, uint32_t(value_of(w, i.from[2], l)), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    if (stored && w.cta->machine->audits) {
      Written& its = w.cta->machine->record.make(at / 4);
      its = {old, w.cta->grid->id, uint32_t(w.cta->number), w.cta->epoch, thread_of(w, l)};
    }
    if (!i.to.empty()) set_value(w, i.to[0], l, old);
  }
}

// -- shared memory -----------------------------------------------------------------------------------------------------

uint8_t* shared(Warp& w, uint32_t at, int bytes, bool writes, const void* with = nullptr) {
  Shared& memory = w.cta->shared;
  if (at % uint32_t(bytes) || uint64_t(at) + uint64_t(bytes) > memory.bytes.size())
    w.fail("at " + std::to_string(at) + " is out of the bounds of shared memory (" + std::to_string(memory.bytes.size()) + " bytes), or not aligned");
  if (w.cta->machine->audits) {
    const bool changes = writes && (with == nullptr || std::memcmp(&memory.bytes[at], with, size_t(bytes)) != 0);
    if (const char* what = memory.note(at, bytes, w.number, writes, changes, w.cta->machine->epoch_of(*w.cta))) w.fail(what);
  }
  return &memory.bytes[at];
}

void load_shared(Warp& w, const Instruction& i) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.active >> l & 1)) continue;
    const uint8_t* from = shared(w, uint32_t(address(w, i.from[0], l)), i.size * i.count, false);
    uint64_t values[8];
    for (int n = 0; n < i.count; ++n) {
      values[n] = read(reinterpret_cast<uint64_t>(from) + uint64_t(n * i.size), i.size);
      if (i.option == kExtends) values[n] = uint64_t(int64_t(values[n] << (64 - 8 * i.size)) >> (64 - 8 * i.size));
    }
    for (int n = 0; n < i.count; ++n) set_value(w, i.to[size_t(n)], l, values[n]);
  }
}
void store_shared(Warp& w, const Instruction& i) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.active >> l & 1)) continue;
    uint8_t bytes[32];
    for (int n = 0; n < i.count; ++n) write(reinterpret_cast<uint64_t>(bytes) + uint64_t(n * i.size), i.size, value_of(w, i.from[size_t(n) + 1], l));
    std::memcpy(shared(w, uint32_t(address(w, i.from[0], l)), i.size * i.count, true, bytes), bytes, size_t(i.size * i.count));
  }
}

// -- cp.async ----------------------------------------------------------------------------------------------------------

// It may arrive at any time until it is waited for: here as late as that. Until then there is poison.
void copy(Warp& w, const Instruction& i) {
  const int whole = int(i.from[2].value);
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.active >> l & 1)) continue;
    const int bytes = i.from.size() > 3 ? int(value_of(w, i.from[3], l)) : whole;
    const uint32_t to = uint32_t(address(w, i.from[0], l));
    const uint64_t from = address(w, i.from[1], l);
    if (bytes > 0) check_bounds(w, i, from, whole);
    std::memset(shared(w, to, whole, true), 0xFF, size_t(whole));
    w.copies.push_back({from, to, bytes, whole, l, w.copies_committed});
  }
}
void commit_copies(Warp& w, const Instruction&) { ++w.copies_committed; }
void wait_for_copies(Warp& w, const Instruction& i) { end_copies(w, i.from.empty() ? 0 : int(i.from[0].value)); }

}  // namespace

void end_copies(Warp& w, int left) {
  Machine& machine = *w.cta->machine;
  size_t kept = 0;
  for (Copy& copy : w.copies) {
    if (copy.commit >= w.copies_committed - left) {
      w.copies[kept++] = copy;
      continue;
    }
    uint8_t bytes[16] = {};
    for (int n = 0; n + 4 <= copy.bytes; n += 4) {
      uint64_t value = read(copy.from + uint64_t(n), 4);
      if (machine.audits) value = weakly(w, copy.from + uint64_t(n), 4, copy.lane, value);
      std::memcpy(bytes + n, &value, 4);
    }
    std::memcpy(shared(w, copy.to, copy.whole, true), bytes, size_t(copy.whole));
  }
  w.copies.resize(kept);
}

bool bind_memory(Instruction& its) {
  const auto& part = its.name;
  const std::string& first = part[0];
  const auto has = [&](const char* name) { return std::find(part.begin(), part.end(), name) != part.end(); };
  if (first == "cp" && part.size() > 2 && part[1] == "async") {
    its.run = part[2] == "commit_group" ? commit_copies : part[2] == "wait_group" || part[2] == "wait_all" ? wait_for_copies : copy;
    return true;
  }
  if (first != "ld" && first != "st" && first != "atom" && first != "red") return false;
  if (part[1] == "param") return false;
  const std::string& type = part.back();
  its.size = std::atoi(type.c_str() + type.find_first_of("0123456789")) / 8;
  for (const char* vector : {"v2", "v4", "v8"})
    if (has(vector)) its.count = vector[1] - '0';
  if (first == "atom" || first == "red") {
    its.option = has("add") ? kAdd : has("exch") ? kExchange : has("cas") ? kCompare : 0;
    if (its.option == 0 || its.size != 4 || has("shared")) return false;
    if (has("acquire") || has("acq_rel")) its.option |= kAcquires;
    if (has("release") || has("acq_rel")) its.option |= kReleases;
    its.run = atomic;
    return true;
  }
  const bool loads = first == "ld";
  if (loads && type[0] == 's' && !has("shared")) return false;   // would have to be extended
  its.option = loads && type[0] == 's' ? kExtends : has("volatile") || has("relaxed") ? kStrong : has("release") ? kReleases : kWeak;
  if (has("acquire")) return false;
  its.run = has("shared") ? (loads ? load_shared : store_shared) : has("global") ? (loads ? load_global : store_global) : nullptr;
  return its.run != nullptr;
}

}  // namespace virtual_gpu
