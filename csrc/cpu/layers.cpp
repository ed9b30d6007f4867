#include "layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "bounds.h"

namespace ppsd {
namespace {

constexpr int kPhases = 5;       // of a layer: qkv, attention, output, MLP in, MLP out
constexpr int kSwigluPanels = 4; // that a member takes at the least of gate and up

// What a member reads after attention, as much of it as stays in its own cache until then.
constexpr int64_t kReadAhead = 256 << 10;

// Adds the squares of int8 activations to `squares` [width].
void add_squares(const Activations& in, float* squares) {
  for (int i = 0; i < in.width; ++i)
    for (int r = 0; r < in.rows; ++r) {
      const float value = in.value(r, i);
      squares[i] += value * value;
    }
}

// A sibling's key and value, kept apart, into an int8 cache.
void adopt_bytes(const KvCache& cache, int head, int position, const uint8_t* key, const uint8_t* value, int offset) {
  const int lane = position % kPanel, head_dim = cache.head_dim;
  uint8_t* keys = cache.panel(cache.keys, head, position);
  uint8_t* values = cache.panel(cache.values, head, position);
  for (int c = 0; c < head_dim; ++c) {
    keys[c / 4 * 4 * kPanel + lane * 4 + c % 4] = uint8_t(key[c] + offset);   // as the kernels want it
    values[(lane / 4 * head_dim + c) * 4 + lane % 4] = value[c];
  }
  for (int b = 0; b < head_dim / kBlock; ++b) {
    const size_t to = size_t(kPanel) * head_dim + (b * kPanel + lane) * sizeof(float), from = head_dim + b * sizeof(float);
    std::memcpy(keys + to, key + from, sizeof(float));
    std::memcpy(values + to, value + from, sizeof(float));
  }
}

// A matrix, and the panels of it that a member takes at the least.
struct Shared {
  const Matrix* matrix;
  int together = kTogether;
};

// The panels that a member begins with.
Team::Stretch panels_of(const Shared& shared, const Team& team, int member) {
  const int panels = shared.matrix->panels();
  const auto [first, last] = team.stretch((panels + shared.together - 1) / shared.together, member);
  return {first * shared.together, std::min(last * shared.together, panels)};
}

ReadThen read_then(const Shared& now, const Shared& next, const Team& team, int member) {
  if (next.matrix == nullptr || next.matrix->data == nullptr) return {};
  return {panels_of(now, team, member).end, next.matrix->panel(panels_of(next, team, member).begin)};
}

ReadAhead after_attention(const PackedLayer& layer, const Team& team, int member) {
  const auto memory_of = [&](const Shared& shared, int64_t most, const uint8_t** begin, const uint8_t** end) {
    const auto [first, last] = panels_of(shared, team, member);
    *begin = shared.matrix->panel(first);
    *end = std::min<const uint8_t*>(shared.matrix->panel(last), *begin + most);
  };
  ReadAhead ahead;
  memory_of({&layer.o}, kReadAhead, &ahead.begin, &ahead.end);
  if (layer.has_mlp())
    memory_of({&layer.gate_up, kSwigluPanels}, kReadAhead - (ahead.end - ahead.begin), &ahead.then_begin, &ahead.then_end);
  return ahead;
}

constexpr int kFirstRows = 1024;   // of a cache that grows

}  // namespace

Piece next_piece(int start, int left, const std::vector<Sibling>& siblings) {
  Piece piece;
  auto next = std::find_if(siblings.begin(), siblings.end(), [&](const Sibling& s) { return s.position >= start; });
  for (; piece.rows < left; ++piece.rows) {
    const bool beside = next != siblings.end() && next->position == start + piece.rows;
    if (piece.all_rows() + 1 + int(beside) > kPassRows) break;
    if (beside) piece.siblings.push_back(*next++);
  }
  return piece;
}

std::vector<float> make_rope(const Rotary& rotary, int capacity, int prompt) {
  const int head_dim = 2 * int(rotary.frequencies.size());
  std::vector<float> rope(size_t(capacity) * head_dim * 2);
  std::vector<float> frequencies = rotary.at(prompt);
  float* to = rope.data();
  for (int position = 0; position < capacity; ++position) {
    if (rotary.by_length() && position >= prompt && position >= rotary.original) frequencies = rotary.at(position + 1);
    for (int panel = 0; panel < head_dim / kPanel; ++panel, to += 2 * kPanel)
      for (int lane = 0; lane < kPanel / 2; ++lane) {   // the other half has the same angles
        const float angle = float(position) * frequencies[panel * 8 + lane];
        const float cosine = std::cos(angle) * rotary.factor, sine = std::sin(angle) * rotary.factor;
        to[lane] = to[lane + 8] = cosine;
        to[kPanel + lane] = -sine;
        to[kPanel + lane + 8] = sine;
      }
  }
  return rope;
}

LayerStack::LayerStack(const Kernels& kernels, const ModelShape& shape, Format format, Stored kv,
                       std::vector<const PackedLayer*> layers, int members, int texts)
    : kernels_(kernels), shape_(shape), format_(format), kv_(kv), layers_(std::move(layers)), texts_(texts) {
  queries_.resize(size_t(kPassRows) * shape.q_outputs());
  mixed_.resize(queries_.size());
  const int widest = std::max(shape.hidden_size, shape.q_outputs());
  for (int member = 0; member < members; ++member)
    inputs_.emplace_back(Activations::bytes(kernels, format, kPassRows, widest));
  mlp_ = Memory(Activations::bytes(kernels, format, kPassRows, shape.intermediate_size));
  for (size_t i = 0; i < layers_.size() * kPhases; ++i) shares_.emplace_back(members);
  if (texts == 1 && !layers_.empty())
    sibling_memory_ = Memory(2 * layers_.size() * Siblings::bytes(kv, shape.num_kv_heads, shape.head_dim));
}

void LayerStack::reserve(int capacity) {
  if (capacity <= capacity_ || layers_.empty()) return;
  capacity = (capacity + kSpan - 1) / kSpan * kSpan;
  const size_t one = KvCache::bytes(kv_, shape_.num_kv_heads, shape_.head_dim, capacity);
  const size_t count = layers_.size() * size_t(texts_);
  Memory memory(2 * one * count);
  std::vector<KvCache> caches;
  for (size_t i = 0; i < count; ++i) {
    KvCache cache{kv_, shape_.num_kv_heads, shape_.head_dim, capacity, memory.as<>() + 2 * one * i, nullptr};
    cache.values = cache.keys + one;
    // Both are ordered by head and then by position (keys: by panels of positions), so a head's rows stay together.
    const size_t old_head = KvCache::bytes(kv_, 1, shape_.head_dim, capacity_);
    const size_t new_head = KvCache::bytes(kv_, 1, shape_.head_dim, capacity);
    for (int head = 0; capacity_ > 0 && head < shape_.num_kv_heads; ++head) {
      std::memcpy(cache.keys + head * new_head, caches_[i].keys + head * old_head, old_head);
      std::memcpy(cache.values + head * new_head, caches_[i].values + head * old_head, old_head);
    }
    caches.push_back(cache);
  }
  kv_memory_ = std::move(memory);
  caches_ = std::move(caches);
  capacity_ = capacity;
}

void LayerStack::hold(int rows, int most) {
  rows = std::min(rows, most);
  if (rows > capacity_) reserve(std::max(rows, std::min(most, std::max(2 * capacity_, kFirstRows))));
}

size_t LayerStack::keep_in_blocks(size_t offset) {
  block_offset_ = offset;
  row_caches_.assign(inputs_.size(), std::vector<KvCache>(kPassRows));
  return offset + 2 * layers_.size() * KvCache::bytes(kv_, shape_.num_kv_heads, shape_.head_dim, kSpan);
}

KvCache LayerStack::in_blocks(size_t layer, uint8_t* const* blocks) const {
  const size_t one = KvCache::bytes(kv_, shape_.num_kv_heads, shape_.head_dim, kSpan);
  KvCache cache{kv_, shape_.num_kv_heads, shape_.head_dim, kSpan, nullptr, nullptr};
  cache.blocks = blocks;
  cache.keys_at = block_offset_ + 2 * layer * one;
  cache.values_at = cache.keys_at + one;
  return cache;
}

void LayerStack::copy_to_blocks(const LayerStack& other, int rows, uint8_t* const* blocks) const {
  const size_t span_bytes = KvCache::bytes(kv_, 1, shape_.head_dim, kSpan);   // of a head
  for (size_t layer = 0; layer < layers_.size(); ++layer)
    for (int span = 0; span * kSpan < rows; ++span) {
      const KvCache from = caches_[layer].of_span(span), to = other.in_blocks(layer, blocks).of_span(span);
      const size_t head_bytes = KvCache::bytes(kv_, 1, shape_.head_dim, from.capacity);
      for (int head = 0; head < shape_.num_kv_heads; ++head) {
        std::memcpy(to.keys + head * span_bytes, from.keys + head * head_bytes, span_bytes);
        std::memcpy(to.values + head * span_bytes, from.values + head * head_bytes, span_bytes);
      }
    }
}

void LayerStack::begin_pass(const std::vector<Segment>& segments) {
  segments_ = segments;
  segment_rows_.clear();
  segment_units_.clear();
  row_positions_.clear();
  int units = 0;
  for (const Segment& segment : segments) {
    check_bound(size_t(segment.start + segment.rows), size_t(segment.spans) * kSpan, "positions of a text");
    for (int row = 0; row < segment.rows; ++row) row_positions_.push_back(segment.start + row);
    const KvCache shape{kv_, shape_.num_kv_heads, shape_.head_dim, kSpan, nullptr, nullptr};
    units += AttendPhase{nullptr, &shape, segment.rows, segment.start, shape_.num_heads, nullptr}.units();
    segment_rows_.push_back(int(row_positions_.size()));
    segment_units_.push_back(units);
  }
  begin_pass(0, int(row_positions_.size()), row_positions_.data());
}

// Units [begin, end) of the attention of all segments.
void LayerStack::attend_segments(size_t layer, int begin, int end, ReadAhead* ahead) {
  size_t i = size_t(std::upper_bound(segment_units_.begin(), segment_units_.end(), begin) - segment_units_.begin());
  for (; begin < end; ++i) {
    const Segment& segment = segments_[i];
    const int first_unit = i > 0 ? segment_units_[i - 1] : 0, first_row = i > 0 ? segment_rows_[i - 1] : 0;
    const size_t at = size_t(first_row) * shape_.q_outputs();
    const KvCache cache = in_blocks(layer, segment.blocks);
    const AttendPhase attend{queries_.data() + at, &cache,  segment.rows, segment.start,                   shape_.num_heads,
                             mixed_.data() + at,   nullptr, ahead,        layers_[layer]->attention.window};
    const int last = std::min(end, segment_units_[i]);
    kernels_.attend(attend, begin - first_unit, last - first_unit);
    begin = last;
  }
}

void LayerStack::observe(float* squares) {
  squares_ = squares;
  std::fill_n(squares, layers_.size() * size_t(InputOffsets(shape_).width), 0.0f);
}

void LayerStack::fill() {
  if (capacity_ > 0) std::memset(kv_memory_.as<>(), 0x3C, kv_memory_.bytes());   // 0.0115 in any format
}

void LayerStack::begin_pass(int start, int rows, const int* positions) {
  check_bound(size_t(rows), kPassRows, "rows");
  for (Shares& shares : shares_) shares.reset();
  cancelled_.store(false, std::memory_order_relaxed);
  start_ = start, rows_ = rows, positions_ = positions;
  sibling_positions_.clear();
}

void LayerStack::begin_pass(const int* positions) { begin_pass(0, texts_, positions); }

void LayerStack::begin_pass(int start, int rows, const std::vector<Sibling>& siblings) {
  begin_pass(start, rows + int(siblings.size()), nullptr);
  if (!layers_.empty()) check_bound(size_t(start + rows), size_t(capacity_), "positions");
  if (siblings.empty()) return;
  order_.resize(size_t(rows_));
  std::iota(order_.begin(), order_.end(), 0);
  int least = start;
  for (const Sibling& sibling : siblings) {
    if (sibling.position < least || sibling.position >= start + rows)
      throw std::logic_error("a pass has a sibling at position " + std::to_string(sibling.position) + ", and no row for it");
    least = sibling.position + 1;
    sibling_positions_.push_back(sibling.position);
  }
  const auto position = [&](int row) { return row < rows ? start + row : sibling_positions_[row - rows]; };
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return position(a) < position(b); });
}

Siblings LayerStack::siblings_of(size_t layer) const {
  const size_t one = Siblings::bytes(kv_, shape_.num_kv_heads, shape_.head_dim);
  uint8_t* keys = sibling_memory_.as<>() + 2 * layer * one;
  return {int(sibling_positions_.size()), sibling_positions_.data(), order_.data(), kv_, keys, keys + one};
}

void LayerStack::adopt(int position) {
  const size_t width = kv_ == Stored::kFp32 ? 4 : 2, row = Siblings::bytes(kv_, 1, shape_.head_dim) / kSiblings;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const Siblings from = siblings_of(layer);
    const KvCache& to = caches_[layer];
    for (int head = 0; head < to.kv_heads; ++head) {
      const size_t slot = (size_t(position % kSiblings) * to.kv_heads + head) * row;
      if (kv_ == Stored::kInt8) {
        adopt_bytes(to, head, position, from.keys + slot, from.values + slot, kernels_.weight_offset);
        continue;
      }
      const size_t at = size_t(head) * to.capacity + position;   // keys: channel by channel of the panel that it is in
      std::memcpy(to.values + at * row, from.values + slot, row);
      uint8_t* key = to.keys + at / kPanel * kPanel * row + position % kPanel * width;
      for (int c = 0; c < to.head_dim; ++c) std::memcpy(key + c * kPanel * width, from.keys + slot + c * width, width);
    }
  }
}

bool LayerStack::pass(Team& team, int member, const float* rope, float* x, const Cancelled& cancelled) {
  const int rows = rows_, start = start_;
  const int* positions = positions_;
  uint8_t* memory = inputs_[member].as<>();
  const int hidden = shape_.hidden_size;
  int phase = 0;
  const auto share = [&](int count, int step, auto&& work) {
    team.share(shares_[phase++], member, count, step, work);
    team.barrier();
  };
  const Activations narrow = Activations::at(kernels_, memory, format_, rows, hidden);
  const Activations heads = Activations::at(kernels_, memory, format_, rows, shape_.q_outputs());
  const InputOffsets inputs(shape_);
  for (size_t number = 0; number < layers_.size(); ++number) {
    const PackedLayer& layer = *layers_[number];
    const KvCache* cache = segments_.empty() ? &caches_[number * texts_] : row_caches_[member].data();
    if (!segments_.empty())
      for (size_t i = 0, row = 0; i < segments_.size(); ++i) {
        const KvCache in = in_blocks(number, segments_[i].blocks);
        for (int r = 0; r < segments_[i].rows; ++r) row_caches_[member][row++] = in;
      }

    const auto observe = [&](const Activations& in, int offset) {
      if (squares_ != nullptr && member == 0) add_squares(in, squares_ + number * inputs.width + offset);
    };

    kernels_.normalize(x, rows, layer.input_norm.data(), shape_.rms_norm_eps, narrow);
    observe(narrow, inputs.qkv);
    const bool last = number + 1 == layers_.size();
    const auto qkv_of = [&](const PackedLayer& of) { return Shared{&of.qkv, of.qkv_together(shape_.head_dim)}; };
    const Shared in = qkv_of(layer), out{&layer.o}, up{&layer.gate_up, kSwigluPanels}, down_to{&layer.down},
                 after = last ? Shared{next_} : qkv_of(*layers_[number + 1]);
    const auto then = [&](const Shared& now, const Shared& next) { return read_then(now, next, team, member); };

    const Siblings kept = sibling_positions_.empty() ? Siblings{} : siblings_of(number);
    const Siblings* siblings = kept.rows > 0 ? &kept : nullptr;
    const QkvPhase qkv{&layer.qkv, layer.bias(layer.qkv_bias), &narrow, rows, start, shape_.num_heads, layer.attention.rotary ? rope : nullptr,
                       queries_.data(), cache, positions, siblings, then(in, out), layer.norms(shape_.rms_norm_eps)};
    share(layer.qkv.panels(), in.together, [&](int begin, int end) { kernels_.qkv(qkv, begin, end); });

    if (positions == nullptr) {
      ReadAhead ahead = after_attention(layer, team, member);
      const AttendPhase attend{queries_.data(), cache,    rows,   start,                 shape_.num_heads,
                               mixed_.data(),   siblings, &ahead, layer.attention.window};
      share(attend.units(), 1, [&](int begin, int end) { kernels_.attend(attend, begin, end); });
    } else if (!segments_.empty()) {
      ReadAhead ahead = after_attention(layer, team, member);
      share(segment_units_.back(), 1, [&](int begin, int end) { attend_segments(number, begin, end, &ahead); });
    } else {
      share(rows, 1, [&](int begin, int end) {
        for (int r = begin; r < end; ++r) {
          const size_t at = size_t(r) * shape_.q_outputs();
          const AttendPhase attend{queries_.data() + at, cache + r, 1,       positions[r],          shape_.num_heads,
                                   mixed_.data() + at,   nullptr,   nullptr, layer.attention.window};
          kernels_.attend(attend, 0, attend.units());
        }
      });
    }

    kernels_.convert(mixed_.data(), rows, heads);
    observe(heads, inputs.o);
    const AddPhase output{&layer.o, layer.bias(layer.o_bias), &heads, rows, x, then(out, layer.has_mlp() ? up : after)};
    share(layer.o.panels(), kTogether, [&](int begin, int end) { kernels_.add(output, begin, end); });

    if (layer.has_mlp()) {
      const int inner = layer.down.inputs;   // in an exit head, at most that of the model's layers
      const Activations mlp = Activations::at(kernels_, mlp_.as<>(), format_, rows, inner);
      kernels_.normalize(x, rows, layer.post_norm.data(), shape_.rms_norm_eps, narrow);
      observe(narrow, inputs.gate_up);
      const SwigluPhase gate_up{&layer.gate_up, layer.bias(layer.gate_up_bias), &narrow, rows, &mlp, then(up, down_to)};
      share(inner / kBlock, 1, [&](int begin, int end) { kernels_.swiglu(gate_up, begin, end); });

      observe(mlp, inputs.down);
      const AddPhase down{&layer.down, layer.bias(layer.down_bias), &mlp, rows, x, then(down_to, after)};
      // Member 0's answer is there for all after the barrier, and is not changed before every member has passed more.
      if (member == 0 && cancelled && cancelled()) cancelled_.store(true, std::memory_order_relaxed);
      share(layer.down.panels(), kTogether, [&](int begin, int end) { kernels_.add(down, begin, end); });
      if (cancelled_.load(std::memory_order_relaxed)) return false;
    }
  }
  return true;
}

FeedbackStack::FeedbackStack(const Kernels& kernels, const ModelShape& shape, const PackedFeedback& feedback, int members,
                             int most_rows)
    : kernels_(kernels), feedback_(feedback), eps_(shape.rms_norm_eps), most_rows_(most_rows), shares_(members) {
  for (int member = 0; member < members && !feedback.distances.empty(); ++member)
    inputs_.emplace_back(Activations::bytes(kernels, feedback.distances[0].format, most_rows, shape.hidden_size));
}

void FeedbackStack::begin_pass(int rows) {
  check_bound(size_t(rows), size_t(most_rows_), "rows of feedback");
  shares_.reset();
  rows_ = rows;
}

void FeedbackStack::pass(Team& team, int member, const float* states, int distance, float* x) {
  const Matrix& matrix = feedback_.distances[distance - 1];
  const Activations input = Activations::at(kernels_, inputs_[member].as<>(), matrix.format, rows_, matrix.inputs);
  kernels_.normalize(states, rows_, feedback_.norm.data(), eps_, input);
  const AddPhase phase{&matrix, nullptr, &input, rows_, x};
  team.share(shares_, member, matrix.panels(), kTogether, [&](int begin, int end) { kernels_.add(phase, begin, end); });
  team.barrier();
}

HeadStack::HeadStack(const Kernels& kernels, const ModelShape& shape, const PackedHead& head,
                     const std::vector<int>& draft_ids, int members)
    : kernels_(kernels), head_(head), draft_ids_(draft_ids), eps_(shape.rms_norm_eps), shares_(members) {
  for (int member = 0; member < members; ++member)
    inputs_.emplace_back(Activations::bytes(kernels, head.lm_head.format, kPassRows, shape.hidden_size));
}

void HeadStack::begin_pass(int rows) {
  check_bound(size_t(rows), kPassRows, "rows of the head");
  shares_.reset();
  rows_ = rows;
}

void HeadStack::pass(Team& team, int member, const float* x, const Sampler& sampler) {
  run(team, member, x, sampler.phase(member, draft_ids(), outputs()));
}

void HeadStack::pass_side_by_side(Team& team, int member, const float* x, const int* positions, const RowChoice* each,
                                  Candidate* best, uint8_t* strange) {
  LogitsPhase phase{};
  phase.positions = positions;
  phase.each = each;
  phase.choice = Choice::kBest;
  phase.draft_ids = draft_ids();
  phase.best = best;
  phase.strange = strange;
  run(team, member, x, phase);
}

void HeadStack::run(Team& team, int member, const float* x, LogitsPhase phase) {
  const Matrix& matrix = head_.lm_head;
  const Activations input = Activations::at(kernels_, inputs_[member].as<>(), matrix.format, rows_, matrix.inputs);
  kernels_.normalize(x, rows_, head_.norm.data(), eps_, input);
  phase.weights = &matrix;
  phase.input = &input;
  phase.rows = rows_;
  team.share(shares_, member, matrix.panels(), kTogether,
             [&](int begin, int end) { kernels_.logits(phase, begin, end); });
  team.barrier();
}

}  // namespace ppsd
