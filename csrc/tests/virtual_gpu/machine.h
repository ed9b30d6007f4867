// The machine: chains of launches, their CTAs and warps in any order that CUDA allows, chosen by a seed.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "warp.h"

namespace virtual_gpu {

// How a load or store orders others.
enum { kWeak = 0, kStrong = 1, kAcquires = 2, kReleases = 4, kExtends = 8 };

struct Launch {
  std::shared_ptr<const Kernel> kernel;
  uint32_t size[3];
  std::vector<uint64_t> parameters;
  std::vector<Range> ranges;
  int shared = 0;
  bool dependent = false;   // it may begin before the launch ahead of it has ended
};

// One device. Several threads may run chains at the same time, each as a stream of its own.
class Machine {
 public:
  // The launches, one after the other. Throws Fault.
  void run(const std::vector<Launch>& chain);

  bool audits = true;       // orders of reads and writes; bounds are always checked
  bool adversary = true;    // any order, by the seed; else the plain one
  void seed(uint64_t seed);
  uint64_t instructions = 0, races = 0;   // of warps; reads that might have seen an older value
  std::string first_race;
  Record record;
  void learn(const Range& range);
  void forget();   // ranges, and who wrote what: memory is somebody else's now
  const std::vector<Range>& known_ranges() const { return ranges_; }

  // For the parts of a warp.
  uint64_t number(uint64_t below) { return adversary ? (*random_)() % below : 0; }
  bool chance(uint64_t of) { return adversary && (*random_)() % of == 0; }
  void race(const Warp& warp);
  uint32_t epoch_of(const Cta& cta) const { return cta.shared_epoch; }

 private:
  struct Chain;   // that a thread runs
  void take_turn();
  void give_turn();
  void begin_grid(Chain& chain, const Launch& launch);
  void begin_cta(Chain& chain, Grid& grid);
  void turn_of(Chain& chain, Warp& warp);
  void pass_barrier(Cta& cta);

  uint64_t seed_ = 0, chains_ = 0;
  std::mt19937_64* random_ = nullptr;   // of the chain whose turn it is
  std::vector<Range> ranges_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t tickets_ = 0, served_ = 0;   // of the threads that want the machine
  std::vector<int> spare_streams_ = {7, 6, 5, 4, 3, 2, 1};
  uint32_t numbers_[kStreams] = {};     // of the last grid of each
  Order ended_, idle_;                  // grids that have ended; that had when last nothing ran
  uint32_t shared_epochs_ = 0;
  std::vector<std::unique_ptr<Cta>> spare_;
};

Machine& machine();   // the one

}  // namespace virtual_gpu
