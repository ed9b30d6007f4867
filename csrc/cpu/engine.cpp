#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "cores.h"

namespace ppsd {
namespace {

std::vector<int> slice(const std::vector<int>& cores, int first, int count) {
  std::vector<int> out;
  for (int i = first; i < first + count && i < int(cores.size()); ++i) out.push_back(cores[i]);
  return int(out.size()) == count ? out : std::vector<int>();   // more threads than cores: the system places them
}

// The threads of a stage's own team: drafting has one, the others are dealt out to the verification stages.
int verify_team_size(int threads, int stages, int stage) {
  const int spare = std::max(threads - 1, stages);
  return spare / stages + (stage < spare % stages);
}

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
  return std::make_unique<Team>(threads, threads > 1 ? slice(cores, 0, threads) : std::vector<int>(), cores);
}

CpuEngine::CpuEngine(std::shared_ptr<const CpuModel> model, int threads, std::vector<int> cuts)
    : model_(std::move(model)),
      threads_(threads),
      shared_team_(make_shared_team(threads)),
      shared_(*shared_team_),
      draft_(*model_, threads) {
  cuts.insert(cuts.begin(), model_->exit_layer);
  cuts.push_back(model_->shape.num_layers);
  const int stages = int(cuts.size()) - 1;
  const std::vector<int> cores = usable_cores().order;
  draft_team_ = std::make_unique<Team>(1, slice(cores, 0, 1));
  int core = 1;
  for (int stage = 0; stage < stages; ++stage) {
    if (cuts[stage] >= cuts[stage + 1])
      throw std::runtime_error("the verification layers " + std::to_string(model_->exit_layer) + " to " +
                               std::to_string(model_->shape.num_layers) + " cannot be cut into these stages");
    const int size = verify_team_size(threads, stages, stage);
    verify_.push_back(std::make_unique<CpuVerifyStage>(*model_, cuts[stage], cuts[stage + 1], std::max(threads, size)));
    verify_teams_.push_back(std::make_unique<Team>(size, slice(cores, core, size)));
    core += size;
  }
  if (!model_->eagle) return;
  if (stages != 1) throw std::runtime_error("an EAGLE-3 head reads what one verification stage leaves: leave --stages away");
  verify_.front()->tell(&draft_);
}

std::string CpuEngine::pin_problem() const {
  std::string problem = shared_.pin_problem();
  for (const auto& team : verify_teams_)
    if (problem.empty()) problem = team->pin_problem();
  return problem;
}

void CpuEngine::judge_by(const std::function<Team::Pass(int)>& told) {
  shared_.judge_by(told);
  draft_team_->judge_by(told);
  for (auto& team : verify_teams_) team->judge_by(told);
}

int CpuEngine::shared_rows(const std::vector<int>& prompt, int own) const {
  const auto differ = std::mismatch(tokens_.begin(), tokens_.end(), prompt.begin(), prompt.end());
  int rows = int(differ.first - tokens_.begin());
  if (rotated_as(int(prompt.size()) - own) != rotated_as_) return 0;
  rows = std::min({rows, int(tokens_.size()) - 1, int(prompt.size()) - 1, draft_.length()});
  for (const auto& stage : verify_) rows = std::min(rows, stage->length());
  if (const EagleText* text = draft_.text()) rows = std::min(rows, text->shared_rows(int(differ.first - tokens_.begin())));
  return std::max(rows, 0);
}

void CpuEngine::reserve(int capacity) {
  if (capacity > capacity_) {
    if (bytes_of_rows(*model_, capacity) > machine_memory()) throw std::bad_alloc();
    rope_ = make_rope(model_->rotary, capacity, rotated_as_);
  }
  capacity = std::max(capacity, capacity_);
  draft_.reserve(capacity, rope_.data());
  for (auto& stage : verify_) stage->reserve(capacity, rope_.data());
  capacity_ = capacity;
}

int CpuEngine::rows_done() const {
  int64_t rows = int64_t(draft_.length()) * model_->exit_layer;
  for (const auto& stage : verify_) rows += int64_t(stage->length()) * stage->layers();
  return int(rows / model_->shape.num_layers);
}

int CpuEngine::rotated_as(int length) const {
  const Rotary& rotary = model_->rotary;
  return rotary.by_length() && length > rotary.original ? length : 0;
}

Stages CpuEngine::begin(const Request& request, int keep) { return begin(request, keep, int(request.prompt.size()) - request.limits.own); }

Stages CpuEngine::begin(const Request& request, int keep, int length) {
  if (const int as = rotated_as(length); as != rotated_as_) {
    rotated_as_ = as;
    rope_ = make_rope(model_->rotary, capacity_, as);
  }
  reserve(request.limits.end);
  Sampling sampling = request.sampling;
  sampling.answer = int(request.prompt.size()) - request.limits.own;
  sampling.stop_ids = request.limits.stop_ids;
  draft_.begin(sampling, keep);
  draft_.set_oracle(request.oracle);
  Stages stages;
  stages.draft = &draft_;
  for (auto& stage : verify_) {
    stage->begin(sampling, keep);
    stages.verify.push_back(stage.get());
  }
  tokens_.clear();
  return stages;
}

void CpuEngine::use_shared_team() {
  draft_.use(&shared_);
  for (auto& stage : verify_) stage->use(&shared_);
}

void CpuEngine::use_own_teams() {
  draft_.use(draft_team_.get());
  for (size_t stage = 0; stage < verify_.size(); ++stage) verify_[stage]->use(verify_teams_[stage].get());
}

void CpuEngine::pin_stage(int stage) const {
  if (stage == 0) draft_team_->pin_caller();
  else verify_teams_[stage - 1]->pin_caller();
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

// A text through all layers; the logits [vocabulary] after each of its `last` rows are told of, row by row.
void CpuEngine::read(const std::vector<int>& ids, int last, const std::function<void(int row, const float* logits)>& told) {
  Request request;
  request.limits.end = int(ids.size());
  const int first = int(ids.size()) - last, keep = std::min(shared_rows(ids), first);
  const Stages stages = begin(request, keep, int(ids.size()));
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
    for (VerifyStage* stage : stages.verify) stage->run(&chunk, nullptr);
    const float* logits = done >= first ? verify_.back()->logits(chunk) : nullptr;
    for (int row = 0; row < rows && logits != nullptr; ++row) told(done + row, logits + size_t(row) * model_->shape.vocab_size);
    done += rows;
  }
  tokens_ = ids;
}

}  // namespace ppsd
