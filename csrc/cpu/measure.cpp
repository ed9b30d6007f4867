#include "measure.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "cores.h"

namespace ppsd {

using Clock = std::chrono::steady_clock;

double read_bandwidth(int threads, int megabytes) {
  const size_t each = (size_t(megabytes) << 20) / threads / 1024 * 1024;
  const Memory memory(each * threads);
  const std::vector<int> cores = usable_cores().order;
  Team team(threads, threads <= int(cores.size()) ? cores : std::vector<int>());
  team.keep_all();
  const Kernels& kernels = pick_kernels();
  std::vector<uint64_t> sums(size_t(threads) * 8);
  team.run([&](int member) { std::fill_n(memory.as<>() + each * member, each, uint8_t(member + 1)); });
  double best = 0.0;
  for (int run = 0; run < 7; ++run) {
    const auto begin = Clock::now();
    team.run([&](int member) { sums[size_t(member) * 8] += kernels.stream(memory.as<>() + each * member, each); });
    best = std::max(best, double(each) * threads / seconds_since(begin) / 1e9);
  }
  return sums[0] == 1 ? 0.0 : best;   // (the sums are wanted, so the reading is done)
}

std::vector<std::string> kernel_names() {
  return {"qkv", "attention", "output", "gate_up", "down", "lm_head", "exit_head", "normalize"};
}

namespace {

// Buffers of a sweep, and the sweep of one kernel over all layers by every member of a team.
class Sweep {
 public:
  Sweep(const CpuModel& model, const Team& team, int rows, int context)
      : model_(model),
        k_(*model.kernels),
        s_(model.shape),
        rows_(rows),
        start_(context),
        x_(size_t(rows) * std::max(s_.hidden_size, s_.q_outputs()), 0.5f),
        queries_(size_t(rows) * s_.q_outputs(), 0.1f),
        mixed_(queries_.size()),
        rope_(make_rope(model.rotary, context + rows)),
        narrow_(Activations::bytes(k_, model.format, rows, s_.hidden_size)),
        heads_(Activations::bytes(k_, model.format, rows, s_.q_outputs())),
        mlp_(Activations::bytes(k_, model.format, rows, s_.intermediate_size)),
        best_(size_t(team.size()) * rows),
        strange_(best_.size()) {
    const int capacity = (context + rows + kSpan - 1) / kSpan * kSpan;
    const size_t one = KvCache::bytes(model.kv, s_.num_kv_heads, s_.head_dim, capacity);
    cache_memory_ = Memory(2 * one * s_.num_layers);
    for (int layer = 0; layer < s_.num_layers; ++layer) {
      uint8_t* at = cache_memory_.as<>() + 2 * one * layer;
      caches_.push_back({model.kv, s_.num_kv_heads, s_.head_dim, capacity, at, at + one});
    }
    for (int i = 0; i < s_.num_layers; ++i) shares_.emplace_back(team.size());
    for (int i = 0; i < rows; ++i) positions_.push_back(start_ + i + 1);
    kv_bytes_ = double(2 * one) / capacity * (context + rows);
    k_.convert(x_.data(), rows, narrow());
    k_.convert(x_.data(), rows, Activations::at(k_, heads_.as<>(), model.format, rows, s_.q_outputs()));
    std::vector<float> wide(size_t(rows) * s_.intermediate_size, 0.5f);
    k_.convert(wide.data(), rows, Activations::at(k_, mlp_.as<>(), model.format, rows, s_.intermediate_size));
  }

  void begin() {
    for (Shares& shares : shares_) shares.reset();
    std::fill(best_.begin(), best_.end(), Candidate{-1e30f, 0});
  }

  // What a pass reads beside this kernel's own weights, this member's part of it: so the caches hold as much of those as
  // they do in a pass, and not what the sweep before has left. (Drafts follow one another: the exit head finds its own.)
  uint64_t read_the_rest(const std::string& name, int member, int members) const {
    if (name == "exit_head") return 0;
    uint64_t sum = 0;
    const auto read = [&](const char* kernel, const Matrix& matrix) {
      const size_t each = matrix.bytes() / members / 1024 * 1024;
      if (name != kernel) sum += k_.stream(matrix.data + each * member, each);
    };
    for (const PackedLayer& layer : model_.layers) {
      read("qkv", layer.qkv);
      read("output", layer.o);
      read("gate_up", layer.gate_up);
      read("down", layer.down);
    }
    read("lm_head", model_.head.lm_head);
    return sum;
  }

  // On every member; false if there is no such kernel.
  bool run(const std::string& name, Team& team, int member) {
    const Activations in = narrow(), heads = Activations::at(k_, heads_.as<>(), model_.format, rows_, s_.q_outputs());
    const Activations mlp = Activations::at(k_, mlp_.as<>(), model_.format, rows_, s_.intermediate_size);
    int phase = 0;
    const auto share = [&](int count, int step, auto&& work) {
      team.share(shares_[phase++], member, count, step, work);
      team.barrier();
    };
    if (name == "lm_head" || name == "exit_head") {
      const PackedHead& head = name == "lm_head" ? model_.head : model_.exit_head;
      if (head.lm_head.data == nullptr) return false;
      LogitsPhase phase{};
      phase.weights = &head.lm_head;
      phase.input = &in;
      phase.rows = rows_;
      phase.positions = positions_.data();
      phase.choice = Choice::kBest;
      phase.draft_ids = name == "exit_head" && !model_.draft_ids.empty() ? model_.draft_ids.data() : nullptr;
      phase.best = best_.data() + size_t(member) * rows_;
      phase.strange = strange_.data() + size_t(member) * rows_;
      share(head.lm_head.panels(), 2, [&](int begin, int end) { k_.logits(phase, begin, end); });
      return true;
    }
    for (int number = 0; number < s_.num_layers; ++number) {
      const PackedLayer& layer = model_.layers[number];
      if (name == "qkv") {
        const QkvPhase phase{&layer.qkv, nullptr, &in, rows_, start_, s_.num_heads, layer.attention.rotary ? rope_.data() : nullptr,
                             queries_.data(), &caches_[number], nullptr, {}, layer.norms(s_.rms_norm_eps)};
        share(layer.qkv.panels(), layer.qkv_together(s_.head_dim), [&](int begin, int end) { k_.qkv(phase, begin, end); });
      } else if (name == "attention") {
        const AttendPhase phase{queries_.data(), &caches_[number], rows_, start_, s_.num_heads,
                                mixed_.data(),   nullptr,          layer.attention.window};
        share(phase.units(), 1, [&](int begin, int end) { k_.attend(phase, begin, end); });
      } else if (name == "output" || name == "down") {
        const bool down = name == "down";
        const AddPhase phase{down ? &layer.down : &layer.o, nullptr, down ? &mlp : &heads, rows_, x_.data()};
        share(s_.hidden_size / kPanel, 2, [&](int begin, int end) { k_.add(phase, begin, end); });
      } else if (name == "gate_up") {
        const SwigluPhase phase{&layer.gate_up, nullptr, &in, rows_, &mlp};
        share(s_.intermediate_size / kBlock, 1, [&](int begin, int end) { k_.swiglu(phase, begin, end); });
      } else if (name == "normalize") {
        if (member == 0) k_.normalize(x_.data(), rows_, layer.input_norm.data(), s_.rms_norm_eps, in);
      } else {
        return false;
      }
    }
    return true;
  }

  // Bytes of weights (or cache) that a sweep reads, and flops that it does.
  std::pair<double, double> work(const std::string& name) const {
    const PackedLayer& layer = model_.layers.front();
    const double n = s_.num_layers, r = rows_, h = s_.hidden_size, q = s_.q_outputs();
    const double inner = s_.intermediate_size;
    if (name == "qkv") return {n * double(layer.qkv.bytes()), n * r * 2 * h * (q + 2 * s_.kv_outputs())};
    if (name == "output") return {n * double(layer.o.bytes()), n * r * 2 * h * q};
    if (name == "gate_up") return {n * double(layer.gate_up.bytes()), n * r * 4 * h * inner};
    if (name == "down") return {n * double(layer.down.bytes()), n * r * 2 * h * inner};
    if (name == "attention") return {n * kv_bytes_, n * r * 4 * q * (start_ + r / 2)};
    if (name == "lm_head") return {double(model_.head.lm_head.bytes()), r * 2 * h * s_.vocab_size};
    if (name == "exit_head") return {double(model_.exit_head.lm_head.bytes()), r * 2 * h * model_.exit_head.lm_head.outputs};
    return {n * r * h * 4.0, n * r * 4 * h};
  }

 private:
  Activations narrow() const { return Activations::at(k_, narrow_.as<>(), model_.format, rows_, s_.hidden_size); }

  const CpuModel& model_;
  const Kernels& k_;
  const ModelShape& s_;
  const int rows_, start_;
  std::vector<float> x_, queries_, mixed_, rope_;
  Memory narrow_, heads_, mlp_, cache_memory_;
  std::vector<KvCache> caches_;
  std::vector<Shares> shares_;
  std::vector<Candidate> best_;
  std::vector<uint8_t> strange_;
  std::vector<int> positions_;   // that the rows choose tokens for
  double kv_bytes_ = 0.0;
};

}  // namespace

KernelTime time_kernel(const CpuModel& model, Team& team, const std::string& name, int rows, int context, int repeats) {
  Sweep sweep(model, team, rows, context);
  std::vector<double> times;
  bool known = true;
  std::atomic<uint64_t> read{0};   // (the sums are wanted, so the reading is done)
  for (int run = -1; run < repeats && known; ++run) {   // the first one warms up
    sweep.begin();
    team.run([&](int member) { read += sweep.read_the_rest(name, member, team.active()); });
    const auto begin = Clock::now();
    team.run([&](int member) {
      const bool done = sweep.run(name, team, member);
      if (member == 0) known = done;
    });
    if (run >= 0) times.push_back(seconds_since(begin));
  }
  if (!known) throw std::runtime_error("there is no kernel " + name + " in this model");
  std::sort(times.begin(), times.end());
  const auto [bytes, flops] = sweep.work(name);
  return {times[times.size() / 2], times.front(), times.back(), bytes, flops};
}

}  // namespace ppsd
