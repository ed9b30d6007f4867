#include "eagle.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checkpoint.h"

namespace ppsd {
namespace {

std::vector<const PackedLayer*> all(const std::vector<PackedLayer>& layers) { return pointers(layers, 0, int(layers.size())); }

}  // namespace

size_t Eagle::bytes() const {
  size_t bytes = fc.bytes() + head.lm_head.bytes();
  for (const PackedLayer& layer : layers)
    bytes += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return bytes;
}

// -- a text ------------------------------------------------------------------------------------------------------------

void EagleText::know(int start, const int* ids, int count) {
  int same = 0;
  const int known = int(ids_.size());
  while (same < count && start + same < known && ids_[size_t(start + same)] == ids[same]) ++same;
  if (start + same < known) cut(start + same);
  ids_.resize(size_t(start));   // tokens of rows that another text has brought are not asked for
  ids_.insert(ids_.end(), ids, ids + count);
}

void EagleText::cut(int length) {
  if (length < int(ids_.size())) ids_.resize(size_t(length));
  end_ = std::min(end_, length);
  drop(std::max(length - 1, 0));
}

void EagleText::drop(int rows) {
  if (rows >= rows_) return;
  outputs_.resize(outputs_.size() - std::min(outputs_.size(), size_t(rows_ - rows)));
  rows_ = rows;
  sure_ = std::min(sure_, rows_);
  if (sure_ < first_) first_ = end_ = sure_, taps_.clear();   // what has been read is not here any more
}

void EagleText::verified(int start, int rows, const float* taps, size_t width) {
  if (start > end_ || start < sure_) {   // the head's rows before it are as good as they can be
    outputs_.clear();
    taps_.clear();
    sure_ = rows_ = first_ = end_ = start;
  }
  const int read = std::min(sure_, end_);   // is not needed again
  taps_.erase(taps_.begin(), taps_.begin() + long(size_t(read - first_) * width));
  first_ = read;
  taps_.resize(size_t(start - first_) * width);
  taps_.insert(taps_.end(), taps, taps + size_t(rows) * width);
  end_ = start + rows;
}

void EagleText::read(int rows, const float* output, size_t hidden, bool sure) {
  rows_ += rows;
  if (sure) {
    sure_ = rows_;
    outputs_.clear();
  }
  outputs_.emplace_back(output, output + hidden);
}

// -- passes ------------------------------------------------------------------------------------------------------------

CpuEagleStack::CpuEagleStack(const Kernels& kernels, const Eagle& eagle, Format format, Stored kv, int members, size_t offset)
    : EagleStack(eagle),
      kernels_(kernels),
      layers_(kernels, eagle.shape, format, kv, all(eagle.layers), members, offset),
      wide_(2 * x_.size()),
      shares_(members) {
  for (int member = 0; member < members; ++member)
    inputs_.emplace_back(Activations::bytes(kernels, eagle.fc.format, kPassRows, int(eagle.tap_width())));
  layers_.followed_by(&eagle.head.lm_head);
  layers_.read_wide(wide_.data());
}

void CpuEagleStack::reserve(int rows) {
  if (rows <= capacity_) return;
  capacity_ = std::max(rows, 2 * capacity_);
  rope_ = make_rope(eagle_.rotary, capacity_);
}

void EagleStack::advance(const std::vector<Work>& works) {
  const size_t hidden = size_t(eagle_.shape.hidden_size), width = tap_width();
  struct Part {
    const Work* work;
    int rows;
  };
  std::vector<Part> parts;
  std::vector<Segment> segments;
  std::vector<int> ids;
  int count = 0;
  const auto begin = [&] {
    parts.clear(), segments.clear(), ids.clear();
    count = 0;
  };
  const auto add = [&](const Work& work, int rows) {
    const EagleText& text = *work.text;
    parts.push_back({&work, rows});
    segments.push_back({rows, text.rows_, work.blocks, work.spans});
    ids.insert(ids.end(), text.ids_.begin() + text.rows_ + 1, text.ids_.begin() + text.rows_ + 1 + rows);
    count += rows;
  };
  const auto end = [&](bool sure) {
    pass(segments, ids, sure);
    const float* x = x_.data();
    for (const Part& part : parts) {
      x += size_t(part.rows) * hidden;
      part.work->text->read(part.rows, x - hidden, hidden, sure);
    }
  };
  for (const Work& work : works)   // what the newest row came to is asked for
    if (work.text->output() == nullptr && work.rows > 0) work.text->drop(work.rows - 1);
  for (;;) {
    begin();
    for (const Work& work : works) {
      EagleText& text = *work.text;
      const int rows = std::min(std::min(text.readable(), work.rows) - text.sure_, kPassRows - count);
      if (rows <= 0) continue;
      text.drop(text.sure_);
      std::memcpy(raw_.data() + size_t(count) * width, text.taps(text.sure_, width), size_t(rows) * width * sizeof(float));
      add(work, rows);
    }
    if (count == 0) break;
    end(true);
  }
  for (;;) {
    begin();
    for (const Work& work : works) {
      EagleText& text = *work.text;
      if (text.rows_ >= work.rows || count == kPassRows) continue;
      float* to = x_.data() + size_t(count) * hidden;
      if (text.output() == nullptr) std::fill_n(to, hidden, 0.0f);   // nobody has computed it: in measurements
      else std::memcpy(to, text.output(), hidden * sizeof(float));
      add(work, 1);
    }
    if (count == 0) break;
    end(false);
  }
}

// raw_ [rows][taps * hidden] -> x_ [rows][hidden]
void CpuEagleStack::make_features(int rows) {
  const size_t hidden = size_t(eagle_.shape.hidden_size), width = tap_width();
  const float eps = eagle_.shape.rms_norm_eps;
  for (int r = 0; r < rows; ++r) {
    float* raw = raw_.data() + size_t(r) * width;
    if (!eagle_.input_norm.empty()) normalize(raw, eagle_.input_norm, eps, raw);
    for (size_t tap = 0; tap < eagle_.fc_norms.size(); ++tap)
      normalize(raw + tap * hidden, eagle_.fc_norms[tap], eps, raw + tap * hidden);
  }
  std::fill_n(x_.data(), size_t(rows) * hidden, 0.0f);
  shares_.reset();
  team_->run([&](int member) {
    const Activations input = Activations::at(kernels_, inputs_[size_t(member)].as<>(), eagle_.fc.format, rows, int(width));
    kernels_.convert(raw_.data(), rows, input);
    const AddPhase phase{&eagle_.fc, eagle_.fc_bias.empty() ? nullptr : eagle_.fc_bias.data(), &input, rows, x_.data(), {}};
    team_->share(shares_, member, eagle_.fc.panels(), kTogether, [&](int begin, int end) { kernels_.add(phase, begin, end); });
    team_->barrier();
  });
}

void CpuEagleStack::pass(const std::vector<Segment>& segments, const std::vector<int>& ids, bool verified) {
  const size_t hidden = size_t(eagle_.shape.hidden_size);
  const float eps = eagle_.shape.rms_norm_eps;
  if (verified) make_features(int(ids.size()));
  for (size_t r = 0; r < ids.size(); ++r) {
    float *embedding = wide_.data() + 2 * r * hidden, *feature = embedding + hidden, *x = x_.data() + r * hidden;
    embed(eagle_.embedding, ids[r], embedding);
    normalize(embedding, eagle_.embedding_norm, eps, embedding);
    if (!verified && eagle_.norm_output) normalize(x, eagle_.head.norm, eps, x);
    normalize(x, eagle_.feature_norm, eps, feature);
    if (eagle_.norm_before_residual) std::memcpy(x, feature, hidden * sizeof(float));
  }
  layers_.run(*team_, segments, rope_.data(), x_.data());
}

}  // namespace ppsd
