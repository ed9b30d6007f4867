#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>

namespace ppsd {

CpuEngine::CpuEngine(std::shared_ptr<const CpuModel> model, int threads)
    : model_(std::move(model)),
      passes_(model_, make_shared_team(threads)),
      head_(*model_->kernels, model_->shape, model_->head, threads),
      sampler_(*model_->kernels, model_->shape.vocab_size, threads) {
  sampler_.begin({});
}

std::vector<float> CpuEngine::logits(const std::vector<int>& ids, int last) {
  const size_t vocabulary = size_t(model_->shape.vocab_size);
  std::vector<float> all;
  all.reserve(size_t(last) * vocabulary);
  read(ids, last, [&](int, const float* logits) { all.insert(all.end(), logits, logits + vocabulary); });
  return all;
}

std::vector<Logprobs> CpuEngine::logprobs(const std::vector<int>& ids, int top) {
  std::vector<Logprobs> all;
  if (ids.size() < 2) return all;
  read({ids.begin(), ids.end() - 1}, int(ids.size()) - 1, [&](int row, const float* logits) {
    all.push_back(Sampler::logprobs_of(*model_->kernels, logits, model_->shape.vocab_size, ids[size_t(row) + 1], top));
  });
  return all;
}

// The system may promise memory that it does not have, so it is asked how much there is.
void CpuEngine::reserve(int rows) {
  if (blocks_ && rows <= blocks_->rows()) return;
  const double bytes = double(passes_.block_bytes()) / kSpan + 8.0 * model_->shape.head_dim;   // of a row, with its rotations
  if (bytes * rows > double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE))) throw std::bad_alloc();
  blocks_ = std::make_unique<TextBlocks>(passes_.block_bytes(), blocks_ ? std::max(rows, 2 * blocks_->rows()) : rows);
  tokens_.clear();
}

// A text through all layers; the logits [vocabulary] after each of its `last` rows are told of, row by row.
void CpuEngine::read(const std::vector<int>& ids, int last, const std::function<void(int row, const float* logits)>& told) {
  const int size = int(ids.size()), first = size - last;
  const size_t hidden = size_t(model_->shape.hidden_size);
  reserve(size);
  const int as = model_->rotary.matters(size);
  passes_.reserve(size, as);
  std::vector<int> known = std::exchange(tokens_, {});
  if (std::exchange(rotated_as_, as) != as) known.clear();
  const auto differ = std::mismatch(known.begin(), known.end(), ids.begin(), ids.end());
  std::vector<float> x(size_t(kPassRows) * hidden);
  for (int done = std::min(int(differ.first - known.begin()), first); done < size;) {
    const int rows = std::min(kPassRows, (done < first ? first : size) - done);
    const std::vector<Segment> segments{blocks_->segment(done, rows)};
    passes_.embed(ids.data() + done, rows, x.data());
    passes_.early(segments, x.data(), nullptr);
    passes_.verify(segments, x.data(), {}, nullptr);
    if (done >= first) {
      std::vector<Head::Row> wanted;
      for (int row = 0; row < rows; ++row) wanted.push_back({x.data() + size_t(row) * hidden, &sampler_, done + row + 1});
      const std::vector<int>& chosen = head_.choose(team(), wanted, true);
      if (std::find(chosen.begin(), chosen.end(), Sampler::kNone) != chosen.end()) throw std::runtime_error(kNoNumber);
      for (int row = 0; row < rows; ++row) told(done + row, sampler_.logits(row, model_->shape.vocab_size));
    }
    done += rows;
  }
  tokens_ = ids;
}

}  // namespace ppsd
