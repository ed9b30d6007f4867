#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "cores.h"

namespace ppsd {
namespace {

// Caches, exit hidden states and rotary table. The system may promise memory that it does not have, so it is asked how
// much there is before a table is filled.
double bytes_of_rows(const CpuModel& model, int rows) {
  const ModelShape& shape = model.shape;
  const double layers = double(model.layers.size() + model.exit_layers.size());
  double kv = 2.0 * double(KvCache::bytes(model.kv, shape.num_kv_heads, shape.head_dim, 1)) * layers;
  if (model.eagle) {
    const ModelShape& own = model.eagle->shape;
    kv += 2.0 * double(KvCache::bytes(model.kv, own.num_kv_heads, own.head_dim, 1)) * own.num_layers;
  }
  return double(rows) * (kv + 4.0 * shape.hidden_size + 8.0 * shape.head_dim);
}

double machine_memory() { return double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE)); }

}  // namespace

// One thread alone has nobody to wait for: it goes where there is room.
std::unique_ptr<Team> make_shared_team(int threads) {
  const std::vector<int> cores = usable_cores().order;
  return std::make_unique<Team>(threads, threads > 1 ? cores_from(cores, 0, threads) : std::vector<int>(), cores);
}

CpuEngine::CpuEngine(std::shared_ptr<const CpuModel> model, int threads)
    : model_(std::move(model)),
      threads_(threads),
      shared_team_(make_shared_team(threads)),
      draft_team_(1, cores_from(usable_cores().order, 0, 1)),
      verify_team_(std::max(threads - 1, 1), cores_from(usable_cores().order, 1, std::max(threads - 1, 1))),
      draft_(*model_, threads),
      verify_(*model_, model_->exit_layer, model_->shape.num_layers, threads) {
  if (model_->eagle) verify_.tell(&draft_);
}

std::string CpuEngine::pin_problem() const {
  const std::string problem = shared_team_->pin_problem();
  return problem.empty() ? verify_team_.pin_problem() : problem;
}

int CpuEngine::shared_rows(const std::vector<int>& ids) const {
  if (model_->rotary.matters(int(ids.size())) != rotated_as_) return 0;
  const int same = int(std::mismatch(tokens_.begin(), tokens_.end(), ids.begin(), ids.end()).first - tokens_.begin());
  int rows = std::min({same, int(tokens_.size()) - 1, int(ids.size()) - 1, draft_.length(), verify_.length()});
  if (const EagleText* text = draft_.text()) rows = std::min(rows, text->shared_rows(same));
  return std::max(rows, 0);
}

void CpuEngine::reserve(int capacity) {
  if (capacity > capacity_) {
    if (bytes_of_rows(*model_, capacity) > machine_memory()) throw std::bad_alloc();
    rope_ = make_rope(model_->rotary, capacity, rotated_as_);
  }
  capacity = std::max(capacity, capacity_);
  draft_.reserve(capacity, rope_.data());
  verify_.reserve(capacity, rope_.data());
  capacity_ = capacity;
}

void CpuEngine::begin(const Sampling& sampling, int end, int keep, int length) {
  if (const int as = model_->rotary.matters(length); as != rotated_as_) {
    rotated_as_ = as;
    rope_ = make_rope(model_->rotary, capacity_, as);
  }
  reserve(end);
  draft_.begin(sampling, keep);
  verify_.begin(sampling, keep);
  tokens_.clear();
}

void CpuEngine::use_shared_team() {
  draft_.use(shared_team_.get());
  verify_.use(shared_team_.get());
}

void CpuEngine::use_own_teams() {
  draft_.use(&draft_team_);
  verify_.use(&verify_team_);
}

void CpuEngine::pin_stage(int stage) { (stage == 0 ? draft_team_ : verify_team_).pin_caller(); }

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

// A text through all layers; the logits [vocabulary] after each of its `last` rows are told of, row by row.
void CpuEngine::read(const std::vector<int>& ids, int last, const std::function<void(int row, const float* logits)>& told) {
  const int first = int(ids.size()) - last, keep = std::min(shared_rows(ids), first);
  begin({}, int(ids.size()), keep, int(ids.size()));
  use_shared_team();
  for (int done = keep; done < int(ids.size());) {
    const int rows = done < first ? first - done : std::min(kPassRows, int(ids.size()) - done);
    DraftStep step;
    step.start = done;
    step.ids.assign(ids.begin() + done, ids.begin() + done + rows);
    draft_.step(step, nullptr, nullptr);
    Chunk chunk;
    chunk.start = done;
    chunk.ids = step.ids;
    draft_.export_hidden(&chunk);
    verify_.run(&chunk, nullptr);
    const float* logits = done >= first ? verify_.logits(chunk) : nullptr;
    for (int row = 0; row < rows && logits != nullptr; ++row) told(done + row, logits + size_t(row) * model_->shape.vocab_size);
    done += rows;
  }
  tokens_ = ids;
}

}  // namespace ppsd
