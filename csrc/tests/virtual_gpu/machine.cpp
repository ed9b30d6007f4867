#include "machine.h"

#include <algorithm>

#include "units.h"

namespace virtual_gpu {
namespace {

constexpr uint64_t kPatience = 50'000'000;   // instructions of warps in which some CTA ends
constexpr int kMostCtas = 8;                 // at the same time
thread_local Order stream_known;             // what the next chain of this thread's stream sees
thread_local std::vector<Seen> stream_seen;

}  // namespace

// What is under way of a chain.
struct Machine::Chain {
  std::mt19937_64 random;
  int stream;
  std::deque<std::unique_ptr<Grid>> grids;        // that have begun and not ended, in order
  std::vector<std::unique_ptr<Cta>> ctas;         // likewise, in any
  Order known;
  std::vector<Seen> seen;   // of CTAs that may not have ended
  uint64_t last_end = 0;
};

Machine& machine() {
  static Machine* one = new Machine;   // never destroyed: threads may outlive main
  return *one;
}

void Warp::fail(const std::string& what) const {
  const Instruction& its = cta->grid->kernel->code[size_t(at)];
  throw Fault(cta->grid->kernel->name + ", line " + std::to_string(its.line) + ", CTA " + std::to_string(cta->number) + ": " + its.text + " " + what);
}

void Machine::seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  seed_ = seed, chains_ = 0, races = 0, first_race.clear();
}

void Machine::learn(const Range& range) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::none_of(ranges_.begin(), ranges_.end(), [&](const Range& r) { return r.begin == range.begin && r.end >= range.end; })) ranges_.push_back(range);
}

void Machine::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ranges_.clear(), record.clear();
}

void Machine::race(const Warp& warp) {
  const Instruction& its = warp.cta->grid->kernel->code[size_t(warp.at)];
  if (races++ == 0) {
    first_race = warp.cta->grid->kernel->name + ", line " + std::to_string(its.line) + ": " + its.text + " is not ordered after what it reads was written";
  }
}

// Threads take their turns in the order in which they ask.
void Machine::take_turn() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t mine = tickets_++;
  changed_.wait(lock, [&] { return served_ == mine; });
}
void Machine::give_turn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++served_;
  changed_.notify_all();
}

void Machine::run(const std::vector<Launch>& launches) {
  take_turn();
  Chain chain;
  chain.random.seed(seed_ * 1000003 + chains_++);
  if (spare_streams_.empty()) {
    give_turn();
    throw Fault("more streams at once than the virtual GPU has");
  }
  chain.stream = spare_streams_.back();
  spare_streams_.pop_back();
  random_ = &chain.random;
  chain.known = stream_known;
  chain.known.merge(idle_);
  merge(chain.seen, stream_seen, chain.known);
  chain.last_end = instructions;
  const auto end = [&] {
    for (auto& cta : chain.ctas) spare_.push_back(std::move(cta));
    spare_streams_.push_back(chain.stream);
    if (spare_streams_.size() == kStreams - 1) idle_ = ended_;
    stream_known = chain.known, stream_seen = chain.seen;
    give_turn();
  };
  try {
    size_t next = 0;
    for (;;) {
      while (next < launches.size()) {
        const bool early = adversary && launches[next].dependent && !chain.grids.empty() && chain.grids.back()->triggered == chain.grids.back()->ctas();
        if (!chain.grids.empty() && !early) break;
        begin_grid(chain, launches[next++]);
      }
      if (chain.grids.empty()) break;
      // A CTA more, or a turn for one of the warps that can go on.
      std::vector<Warp*> ready;
      for (auto& cta : chain.ctas)
        for (Warp& warp : cta->warps)
          if (warp.alive && warp.barrier < 0 && !(warp.waiting && cta->grid->ahead != nullptr)) ready.push_back(&warp);
      std::vector<Grid*> more;
      for (auto& grid : chain.grids)
        if (grid->begun < grid->ctas()) more.push_back(grid.get());
      const bool room = chain.ctas.size() < (adversary ? size_t(kMostCtas) : 1);
      if (!more.empty() && (ready.empty() || (room && number(3) == 0))) {
        begin_cta(chain, *more[number(more.size())]);
        continue;
      }
      if (ready.empty()) throw Fault(chain.grids.front()->kernel->name + ": no warp can go on: some wait at a barrier that others do not come to");
      turn_of(chain, *ready[number(ready.size())]);
      if (instructions - chain.last_end > kPatience) throw Fault(chain.grids.front()->kernel->name + ": it does not end");
      if (number(4) == 0) {   // somebody else's chain
        give_turn(), take_turn();
        random_ = &chain.random;
      }
    }
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Machine::begin_grid(Chain& chain, const Launch& launch) {
  auto grid = std::make_unique<Grid>();
  grid->kernel = launch.kernel.get();
  std::copy(launch.size, launch.size + 3, grid->size);
  grid->parameters = launch.parameters, grid->ranges = launch.ranges, grid->shared = launch.shared;
  grid->id = uint32_t(chain.stream) << 28 | ++numbers_[chain.stream];
  grid->dependent = launch.dependent;
  grid->ahead = chain.grids.empty() ? nullptr : chain.grids.back().get();
  grid->known = chain.known, grid->seen = chain.seen;
  grid->order.resize(launch.size[0] * launch.size[1] * launch.size[2]);
  for (size_t i = 0; i < grid->order.size(); ++i) grid->order[i] = int(i);
  if (adversary) std::shuffle(grid->order.begin(), grid->order.end(), chain.random);
  chain.grids.push_back(std::move(grid));
}

void Machine::begin_cta(Chain& chain, Grid& grid) {
  std::unique_ptr<Cta> cta;
  if (spare_.empty()) cta = std::make_unique<Cta>();
  else cta = std::move(spare_.back()), spare_.pop_back();
  const Kernel& kernel = *grid.kernel;
  const int number = grid.order[size_t(grid.begun++)], warps = kernel.threads / kLanes;
  cta->grid = &grid, cta->machine = this, cta->number = number;
  cta->place[0] = uint32_t(number) % grid.size[0];
  cta->place[1] = uint32_t(number) / grid.size[0] % grid.size[1];
  cta->place[2] = uint32_t(number) / grid.size[0] / grid.size[1];
  cta->epoch = 1, cta->store_epoch = 0, cta->shared_epoch = ++shared_epochs_;
  cta->left = warps, cta->arrived = cta->triggers = 0;
  cta->known = grid.known, cta->seen = grid.seen;
  cta->shared.begin(grid.shared);
  const size_t words = size_t(kernel.units) * kLanes;
  cta->registers.assign(words * size_t(warps), 0x7FC0DEADu);   // what no instruction has written
  cta->warps.clear();
  cta->warps.resize(size_t(warps));
  for (int n = 0; n < warps; ++n) {
    Warp& warp = cta->warps[size_t(n)];
    warp.cta = cta.get(), warp.number = n, warp.registers = cta->registers.data() + words * size_t(n);
    warp.predicates.assign(size_t(kernel.predicates), 0);
    warp.groups = {{0, ~0u, false}};
    warp.waited = !grid.dependent || !kernel.waits;
    if (grid.dependent && !kernel.waits) warp.waited = false;   // it never does
    for (const auto& [name, place] : kernel.specials)
      for (int l = 0; l < kLanes; ++l) {
        uint32_t value = 0;
        const auto axis = [&] { return size_t(name.back() - 'x'); };
        if (name.compare(0, 5, "%tid.") == 0) value = axis() == 0 ? uint32_t(n * kLanes + l) : 0;
        else if (name.compare(0, 7, "%ctaid.") == 0) value = cta->place[axis()];
        else if (name.compare(0, 8, "%nctaid.") == 0) value = grid.size[axis()];
        else if (name.compare(0, 6, "%ntid.") == 0) value = axis() == 0 ? uint32_t(kernel.threads) : 1;
        else if (name == "%laneid") value = uint32_t(l);
        else if (name == "%lanemask_lt") value = (1u << l) - 1;
        else throw Fault(kernel.name + ": the machine does not know " + name);
        warp.registers[size_t(place) * kLanes + size_t(l)] = value;
      }
  }
  chain.ctas.push_back(std::move(cta));
}

void Machine::pass_barrier(Cta& cta) {
  ++cta.epoch, cta.shared_epoch = ++shared_epochs_, cta.arrived = 0;
  for (Warp& warp : cta.warps) {
    merge(cta.seen, warp.acquired, cta.known);
    warp.acquired.clear(), warp.barrier = -1;
  }
}

// Executes a warp's instructions until others may have a turn.
void Machine::turn_of(Chain& chain, Warp& w) {
  Cta& cta = *w.cta;
  Grid& grid = *cta.grid;
  const Instruction* code = grid.kernel->code.data();
  const auto see_what_is_ahead = [&] {
    cta.known.merge(chain.known);
    merge(cta.seen, chain.seen, cta.known);
  };
  if (w.waiting) {   // the grid ahead has ended
    w.waiting = false, w.waited = true;
    see_what_is_ahead();
  }
  // Groups at the same instruction are one.
  const auto meet = [&] {
    for (size_t a = 0; a < w.groups.size(); ++a)
      for (size_t b = w.groups.size(); --b > a;)
        if (w.groups[a].at == w.groups[b].at) {
          w.groups[a].lanes |= w.groups[b].lanes;
          w.groups[a].blocked = w.groups[a].blocked && w.groups[a].lanes != w.alive;
          w.groups.erase(w.groups.begin() + long(b));
        }
  };
  for (;;) {
    meet();
    size_t which = w.groups.size();
    std::vector<size_t> free;
    for (size_t g = 0; g < w.groups.size(); ++g)
      if (!w.groups[g].blocked) {
        free.push_back(g);
        if (which == w.groups.size() || w.groups[g].at < w.groups[which].at) which = g;
      }
    if (free.empty()) {
      w.at = w.groups[0].at;
      w.fail("is reached by a part of the warp alone");
    }
    if (chance(4)) which = free[number(free.size())];
    Group group = w.groups[which];
    int at = group.at;
    const auto leave = [&] { w.groups[which].at = at; };
    for (bool first = true;; first = false) {
      const Instruction& its = code[at];
      if (its.label && !first && w.groups.size() > 1) {
        leave();
        break;
      }
      uint32_t active = group.lanes;
      if (its.predicate >= 0) active &= its.negated ? ~w.predicates[size_t(its.predicate)] : w.predicates[size_t(its.predicate)];
      ++instructions;
      w.at = at, w.active = active;
      if (its.flow == Flow::kPlain) {
        if (active) its.run(w, its);
        ++at;
        continue;
      }
      if (its.flow == Flow::kBranch) {
        const uint32_t others = group.lanes & ~active;
        if (!others) {
          at = its.from[0].place;
        } else if (!active) {
          ++at;
        } else {
          w.groups[which] = {its.from[0].place, active, false};
          w.groups.push_back({at + 1, others, false});
          break;
        }
        continue;
      }
      if (its.flow == Flow::kTurn) {
        if (active) its.run(w, its);
        ++at;
        if (!adversary && active == 0) continue;
        leave();
        return;
      }
      if (its.flow == Flow::kReturn) {
        w.alive &= ~active;
        if (const uint32_t others = group.lanes & ~active) {
          w.groups[which] = {at + 1, others, false};
          break;
        }
        w.groups.erase(w.groups.begin() + long(which));
        if (!w.groups.empty()) break;
        if (!w.copies.empty() || !w.products.empty()) w.fail("ends with something under way that it has not waited for");
        if (cta.arrived) w.fail("ends while other warps wait at a barrier");
        merge(grid.seen_after, w.acquired, cta.known);
        if (--cta.left == 0) {
          chain.last_end = instructions;
          if (cta.triggers < int(cta.warps.size())) ++grid.triggered;
          grid.after.merge(cta.known);
          merge(grid.seen_after, cta.seen, grid.after);
          if (++grid.ended == grid.ctas()) {
            if (chain.grids.front().get() != &grid) w.fail("ends before the kernel ahead has");
            chain.known.merge(grid.after);
            chain.known.grids[chain.stream] = number_of(grid.id);
            merge(chain.seen, grid.seen_after, chain.known);
            ended_.merge(chain.known);
          }
          const auto mine = std::find_if(chain.ctas.begin(), chain.ctas.end(), [&](const auto& each) { return each.get() == &cta; });
          spare_.push_back(std::move(*mine));
          chain.ctas.erase(mine);
          if (grid.ended == grid.ctas()) {
            if (chain.grids.size() > 1) chain.grids[1]->ahead = nullptr;
            chain.grids.pop_front();
          }
        }
        return;
      }
      // What follows takes all lanes. A part of them waits for the others.
      if (group.lanes != w.alive) {
        leave();
        w.groups[which].blocked = true;
        break;
      }
      if (active != group.lanes) {
        if (active == 0) {
          ++at;
          continue;
        }
        w.fail("is executed by a part of the warp alone");
      }
      if (its.flow == Flow::kTogether) {
        if (w.alive != ~0u) w.fail("is executed after lanes have ended");
        its.run(w, its);
        if (its.name[0] == "bar" && cta.warps.size() == 1) pass_barrier(cta);
        ++at;
        continue;
      }
      ++at;
      leave();
      if (its.flow == Flow::kBarrier) {
        if (cta.left != int(cta.warps.size())) w.fail("waits for warps that have ended");
        w.barrier = at;
        if (++cta.arrived == cta.left) pass_barrier(cta);
      } else if (its.flow == Flow::kWait) {
        if (!w.waited) {
          w.waiting = grid.ahead != nullptr;
          if (!w.waiting) w.waited = true, see_what_is_ahead();
        }
      } else {
        if (!w.waited) w.fail("lets dependents begin before it has waited");
        if (++cta.triggers == int(cta.warps.size())) ++grid.triggered;
      }
      if (!adversary && cta.warps.size() == 1 && !w.waiting) break;
      return;
    }
  }
}

}  // namespace virtual_gpu
