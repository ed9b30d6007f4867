#include "heads.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>


namespace ppsd {
namespace {

constexpr int kPanelsInTurn = 8;   // panels that all groups are multiplied with while they are in the cache

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Head::Head(const Kernels& kernels, const ModelShape& shape, const PackedHead& head, int members)
    : kernels_(kernels),
      head_(head),
      whole_(head.lm_head.outputs),
      eps_(shape.rms_norm_eps),
      x_(size_t(kPassRows) * shape.hidden_size),
      phases_(size_t(members)),
      best_(size_t(members)),
      strange_(size_t(members)),
      panels_(members) {
  const auto bytes = [&](int rows) {
    return aligned(Activations::bytes(kernels, head.lm_head.format, rows, shape.hidden_size));
  };
  for (int member = 0; member < members; ++member) inputs_.emplace_back(bytes(kPassRows) + kPassRows * bytes(1));
}

void Head::begin_pass(const std::vector<Row>& rows, bool store) {
  check_bound(rows.size(), kPassRows, "rows of the head");
  groups_.clear();
  order_.clear();
  choices_.clear();
  positions_.clear();
  failures_.clear();
  chosen_.assign(rows.size(), Sampler::kNone);
  panels_.reset();
  group(rows, store);
  for (auto& best : best_) best.assign(choices_.size(), kNoCandidate);
  for (auto& strange : strange_) strange.assign(choices_.size(), 0);
  place(rows);
  for (auto group = groups_.begin(); group != groups_.end();) {
    const auto first = positions_.begin() + group->first;
    try {
      if (group->sampler != nullptr)
        group->sampler->begin_rows({first, first + group->rows}, group->vocabulary->size(), store);
      ++group;
    } catch (const std::runtime_error&) {   // of a grammar: the others go on
      failures_.emplace_back(group->sampler, std::current_exception());
      group = groups_.erase(group);
    }
  }
}

// Rows that are alike first, then those of each other sampler.
void Head::group(const std::vector<Row>& rows, bool store) {
  for (int r = 0; r < int(rows.size()); ++r)
    if (const auto choice = store ? std::nullopt : rows[r].sampler->alike(rows[r].position)) {
      order_.push_back(r);
      choices_.push_back(*choice);
    }
  if (!order_.empty()) groups_.push_back({0, int(order_.size()), nullptr, 0, nullptr, &whole_, 0});
  for (int r = 0; r < int(rows.size()); ++r) {
    if (!store && rows[r].sampler->alike(rows[r].position)) continue;
    if (groups_.empty() || groups_.back().sampler != rows[r].sampler)
      groups_.push_back({int(order_.size()), 0, rows[r].sampler, 0, nullptr, rows[r].vocabulary ? rows[r].vocabulary : &whole_, 0});
    order_.push_back(r);
    ++groups_.back().rows;
  }
  for (int r : order_) positions_.push_back(rows[r].position);
}

// Where the rows of each group are, and its activations.
void Head::place(const std::vector<Row>& rows) {
  const size_t hidden = size_t(head_.lm_head.inputs);
  size_t memory = 0;
  panels_in_all_ = head_.lm_head.panels();
  for (Group& group : groups_) {
    group.own_from = panels_in_all_;
    panels_in_all_ += group.vocabulary->own().panels();
    group.memory = memory;
    memory += aligned(Activations::bytes(kernels_, head_.lm_head.format, group.rows, int(hidden)));
    const float* first = rows[order_[group.first]].x;
    bool together = true;
    for (int r = 0; r < group.rows; ++r) together = together && rows[order_[group.first + r]].x == first + size_t(r) * hidden;
    group.x = together ? first : x_.data() + size_t(group.first) * hidden;
    for (int r = 0; !together && r < group.rows; ++r)
      std::memcpy(x_.data() + size_t(group.first + r) * hidden, rows[order_[group.first + r]].x, hidden * sizeof(float));
  }
}

std::exception_ptr Head::failure(const Sampler* sampler) const {
  for (const auto& [failed, failure] : failures_)
    if (failed == sampler) return failure;
  return nullptr;
}

const std::vector<int>& Head::chosen() {
  for (const Group& group : groups_)
    for (int i = group.first; group.sampler == nullptr && i < group.first + group.rows; ++i) {
      Candidate best = kNoCandidate;
      for (const auto& bests : best_) best = std::min(best, bests[i]);
      const bool strange = std::any_of(strange_.begin(), strange_.end(), [i](const auto& of) { return of[size_t(i)] != 0; });
      chosen_[order_[i]] = strange ? Sampler::kNone : best.id;
    }
  return chosen_;
}

const std::vector<int>& Head::choose(Team& team, const std::vector<Row>& rows, bool store) {
  begin_pass(rows, store);
  team.run([&](int member) { pass(team, member); });
  return chosen();
}

void Head::pass(Team& team, int member) {
  const Matrix& matrix = head_.lm_head;
  std::vector<Activations> inputs;
  auto& phases = phases_[member];
  phases.clear();
  for (const Group& group : groups_) {
    uint8_t* memory = inputs_[member].as<>() + group.memory;
    inputs.push_back(Activations::at(kernels_, memory, matrix.format, group.rows, matrix.inputs));
    kernels_.normalize(group.x, group.rows, head_.norm.data(), eps_, inputs.back());
    LogitsPhase phase{};
    if (group.sampler != nullptr) {
      phase = group.sampler->phase(member, *group.vocabulary);
    } else {
      phase.positions = positions_.data();
      phase.each = choices_.data();
      phase.choice = Choice::kBest;
      phase.best = best_[member].data();
      phase.strange = strange_[member].data();
    }
    phase.rows = group.rows;
    phases.push_back(phase);
  }
  for (size_t i = 0; i < phases.size(); ++i) {
    phases[i].weights = &matrix;
    phases[i].input = &inputs[i];
  }
  const int step = phases.size() == 1 ? matrix.panels() : kPanelsInTurn;
  team.share(panels_, member, panels_in_all_, kTogether, [&](int begin, int end) {
    own_logits(phases, begin, end);
    for (end = std::min(end, matrix.panels()); begin < end; begin += step)
      for (const LogitsPhase& phase : phases) kernels_.logits(phase, begin, std::min(begin + step, end));
  });
  team.barrier();
  for (const Group& group : groups_) {
    if (group.sampler == nullptr) continue;
    for (int r = 0; r < group.rows; ++r)
      if ((group.first + r) % team.active() == member)
        chosen_[order_[group.first + r]] =
            group.sampler->choose(member, r, positions_[group.first + r], *group.vocabulary);
  }
}

// Those of the panels [begin, end) that are the groups' own: of ids that stand in their texts. Logits are stored.
void Head::own_logits(const std::vector<LogitsPhase>& phases, int begin, int end) {
  for (size_t i = 0; i < groups_.size(); ++i) {
    const Matrix& own = groups_[i].vocabulary->own();
    const int first = std::max(begin - groups_[i].own_from, 0), last = std::min(end - groups_[i].own_from, own.panels());
    if (first >= last) continue;
    LogitsPhase phase = phases[i];
    phase.weights = &own;
    phase.logits += head_.lm_head.outputs;
    kernels_.logits(phase, first, last);
  }
}

}  // namespace ppsd
