#include "layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

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

}  // namespace

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
                       std::vector<const PackedLayer*> layers, int members, size_t offset)
    : kernels_(kernels), shape_(shape), format_(format), kv_(kv), layers_(std::move(layers)), offset_(offset) {
  queries_.resize(size_t(kPassRows) * shape.q_outputs());
  mixed_.resize(queries_.size());
  const int widest = std::max(shape.hidden_size, shape.q_outputs());
  for (int member = 0; member < members; ++member)
    inputs_.emplace_back(Activations::bytes(kernels, format, kPassRows, widest));
  mlp_ = Memory(Activations::bytes(kernels, format, kPassRows, shape.intermediate_size));
  for (size_t i = 0; i < layers_.size() * kPhases; ++i) shares_.emplace_back(members);
  caches_.assign(size_t(members), std::vector<KvCache>(kPassRows));
}

size_t LayerStack::end() const {
  return offset_ + 2 * layers_.size() * KvCache::bytes(kv_, shape_.num_kv_heads, shape_.head_dim, kSpan);
}

KvCache LayerStack::in_blocks(size_t layer, uint8_t* const* blocks) const {
  const size_t one = KvCache::bytes(kv_, shape_.num_kv_heads, shape_.head_dim, kSpan);
  KvCache cache{kv_, shape_.num_kv_heads, shape_.head_dim, kSpan, nullptr, nullptr};
  cache.blocks = blocks;
  cache.keys_at = offset_ + 2 * layer * one;
  cache.values_at = cache.keys_at + one;
  return cache;
}

void LayerStack::begin_pass(const std::vector<Segment>& segments) {
  segments_ = segments;
  segment_rows_.clear();
  segment_units_.clear();
  row_positions_.clear();
  int units = 0;
  for (const Segment& segment : segments) {
    if (!layers_.empty()) check_bound(size_t(segment.start + segment.rows), size_t(segment.spans) * kSpan, "positions of a text");
    for (int row = 0; row < segment.rows; ++row) row_positions_.push_back(segment.start + row);
    const KvCache shape{kv_, shape_.num_kv_heads, shape_.head_dim, kSpan, nullptr, nullptr};
    units += AttendPhase{nullptr, &shape, segment.rows, segment.start, shape_.num_heads, nullptr}.units();
    segment_rows_.push_back(int(row_positions_.size()));
    segment_units_.push_back(units);
  }
  rows_ = int(row_positions_.size());
  check_bound(size_t(rows_), kPassRows, "rows");
  for (Shares& shares : shares_) shares.reset();
  cancelled_.store(false, std::memory_order_relaxed);
}

// Units [begin, end) of the attention of all segments.
void LayerStack::attend_segments(size_t layer, int begin, int end, ReadAhead* ahead) {
  size_t i = size_t(std::upper_bound(segment_units_.begin(), segment_units_.end(), begin) - segment_units_.begin());
  for (; begin < end; ++i) {
    const Segment& segment = segments_[i];
    const int first_unit = i > 0 ? segment_units_[i - 1] : 0, first_row = i > 0 ? segment_rows_[i - 1] : 0;
    const size_t at = size_t(first_row) * shape_.q_outputs();
    const KvCache cache = in_blocks(layer, segment.blocks);
    const AttendPhase attend{queries_.data() + at, &cache, segment.rows, segment.start, shape_.num_heads,
                             mixed_.data() + at,   ahead,  layers_[layer]->attention.window};
    const int last = std::min(end, segment_units_[i]);
    kernels_.attend(attend, begin - first_unit, last - first_unit);
    begin = last;
  }
}

void LayerStack::read_wide(const float* wide) {
  wide_ = wide;
  const int inputs = layers_.front()->qkv.inputs;
  for (Memory& memory : inputs_) memory = Memory(Activations::bytes(kernels_, format_, kPassRows, std::max(inputs, shape_.q_outputs())));
}

void LayerStack::tap(std::vector<int> layers) {
  taps_ = std::move(layers);
  tapped_.resize(size_t(kPassRows) * taps_.size() * size_t(shape_.hidden_size));
}

void LayerStack::keep_taps(size_t layer, const float* x) {
  const size_t hidden = size_t(shape_.hidden_size), count = taps_.size();
  for (size_t tap = 0; tap < count; ++tap)
    for (size_t row = 0; taps_[tap] == int(layer) && row < size_t(rows_); ++row)
      std::memcpy(tapped_.data() + (row * count + tap) * hidden, x + row * hidden, hidden * sizeof(float));
}

void LayerStack::observe(float* squares) {
  squares_ = squares;
  std::fill_n(squares, layers_.size() * size_t(InputOffsets(shape_).width), 0.0f);
}

bool LayerStack::pass(Team& team, int member, const float* rope, float* x, const Cancelled& cancelled) {
  const int rows = rows_;
  // Rows of one text have one cache, and their positions follow from the first one.
  const bool one = segments_.size() == 1;
  const int start = one ? segments_.front().start : 0;
  const int* positions = one ? nullptr : row_positions_.data();
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
    KvCache* cache = caches_[member].data();
    for (size_t i = 0, row = 0; i < segments_.size(); ++i) {
      const KvCache in = in_blocks(number, segments_[i].blocks);
      for (int r = 0; r < (one ? 1 : segments_[i].rows); ++r) cache[row++] = in;
    }

    const auto observe = [&](const Activations& in, int offset) {
      if (squares_ != nullptr && member == 0) add_squares(in, squares_ + number * inputs.width + offset);
    };

    if (member == 0) keep_taps(number, x);   // x changes after two barriers
    const bool wide = number == 0 && wide_ != nullptr;
    const Activations first = wide ? Activations::at(kernels_, memory, format_, rows, layer.qkv.inputs) : narrow;
    if (wide) kernels_.convert(wide_, rows, first);
    else kernels_.normalize(x, rows, layer.input_norm.data(), shape_.rms_norm_eps, first);
    observe(first, inputs.qkv);
    const bool last = number + 1 == layers_.size();
    const auto qkv_of = [&](const PackedLayer& of) { return Shared{&of.qkv, of.qkv_together(shape_.head_dim)}; };
    const Shared in = qkv_of(layer), out{&layer.o}, up{&layer.gate_up, kSwigluPanels}, down_to{&layer.down},
                 after = last ? Shared{next_} : qkv_of(*layers_[number + 1]);
    const auto then = [&](const Shared& now, const Shared& next) { return read_then(now, next, team, member); };

    const QkvPhase qkv{&layer.qkv, layer.bias(layer.qkv_bias), &first, rows, start, shape_.num_heads, layer.attention.rotary ? rope : nullptr,
                       queries_.data(), cache, positions, then(in, out), layer.norms(shape_.rms_norm_eps)};
    share(layer.qkv.panels(), in.together, [&](int begin, int end) { kernels_.qkv(qkv, begin, end); });

    if (layer.o.data == nullptr) continue;   // keys and values alone

    ReadAhead ahead = after_attention(layer, team, member);
    share(segment_units_.back(), 1, [&](int begin, int end) { attend_segments(number, begin, end, &ahead); });

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
  if (member == 0) keep_taps(layers_.size(), x);
  return true;
}

bool LayerStack::run(Team& team, const std::vector<Segment>& segments, const float* rope, float* x, const Cancelled& cancelled) {
  begin_pass(segments);
  bool done = true;
  team.run([&](int member) {
    if (!pass(team, member, rope, x, cancelled) && member == 0) done = false;
  });
  return done;
}

void normalize(const float* x, const std::vector<float>& weight, float eps, float* out) {
  double squares = 0.0;
  const size_t n = weight.size();
  for (size_t i = 0; i < n; ++i) squares += double(x[i]) * x[i];
  const float scale = 1.0f / std::sqrt(float(squares / double(n)) + eps);
  for (size_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

void normalize(const float* x, const PackedTap& tap, float eps, float* out) {
  normalize(x, tap.norm, eps, out);
  for (size_t i = 0; i < tap.bias.size(); ++i) out[i] += tap.bias[i];
}

FeedbackStack::FeedbackStack(const Kernels& kernels, const ModelShape& shape, const PackedFeedback& feedback, const PackedTap& tap,
                             int members)
    : kernels_(kernels), feedback_(feedback), tap_(tap), eps_(shape.rms_norm_eps), shares_(members) {
  for (int member = 0; member < members && !feedback.distances.empty(); ++member)
    inputs_.emplace_back(Activations::bytes(kernels, feedback.distances[0].format, kPassRows, shape.hidden_size));
}

void FeedbackStack::begin_pass(int rows) {
  check_bound(size_t(rows), size_t(kPassRows), "rows of feedback");
  shares_.reset();
  rows_ = rows;
}

void FeedbackStack::pass(Team& team, int member, const float* states, int distance, float* x) {
  const Matrix& matrix = feedback_.distances[distance - 1];
  const Activations input = Activations::at(kernels_, inputs_[member].as<>(), matrix.format, rows_, matrix.inputs);
  if (tap_.layer > 0) kernels_.convert(states, rows_, input);
  else kernels_.normalize(states, rows_, feedback_.norm.data(), eps_, input);
  add(team, member, matrix, input, x);
}

void FeedbackStack::add(Team& team, int member, const Matrix& matrix, const Activations& input, float* x) {
  const AddPhase phase{&matrix, nullptr, &input, rows_, x, {}};
  team.share(shares_, member, matrix.panels(), kTogether, [&](int begin, int end) { kernels_.add(phase, begin, end); });
  team.barrier();
}

std::vector<float> FeedbackStack::hear(Team& team, const std::vector<const float*>& states) {
  const size_t hidden = feedback_.norm.size();
  std::vector<float> heard(states.size() * hidden), z(heard.size());
  for (size_t i = 0; i < states.size(); ++i) {
    normalize(states[i], feedback_.norm, eps_, heard.data() + i * hidden);
    normalize(states[i] + hidden, tap_, eps_, z.data() + i * hidden);
  }
  begin_pass(int(states.size()));
  team.run([&](int member) {
    const Activations input = Activations::at(kernels_, inputs_[size_t(member)].as<>(), tap_.feedback.format, rows_, int(hidden));
    kernels_.convert(z.data(), rows_, input);
    add(team, member, tap_.feedback, input, heard.data());
  });
  return heard;
}

}  // namespace ppsd
