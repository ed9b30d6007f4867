#include "calibrate.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <stdexcept>

#include "../cpu/cores.h"

namespace ppsd {
namespace {

constexpr double kSeconds = 0.35;        // that a calibration takes, or a few passes of each kind
constexpr double kShortHanded = 0.2;     // share of the rounds on fewer threads from which on a moment was crowded
constexpr int kDoubts = 3;               // measurements more where a plain step and its parts differ by half

using Clock = std::chrono::steady_clock;
using Times = std::map<int, std::vector<double>>;   // seconds, by the number of rows

constexpr int kContext = StageCosts::kContext;    // rows before those that are timed
constexpr int kDeep = 1024;                       // the same, to learn what a longer text costs
constexpr int kDeepRows[] = {1, 4, 16};
constexpr int kRows[] = {1, 2, 3, 4, 6, 8, 12, 16};   // those between are interpolated
constexpr int kManyRows[] = {24, 32, 48, 64};     // of passes over many answers
constexpr int kMoreDrafts = 3;                    // of a round, after the first one
constexpr int kVerified = 3;                      // rows of a pass that an EAGLE-3 head reads before it drafts
constexpr int kPlainSteps = 3;                    // one after the other
// Repeats of every kind, and the most of them where a model is small enough for the time: of rounds, of passes over many
// answers, of those after a longer text.
constexpr int kLeast = 2, kMost = 15;
constexpr int kManyLeast = 1, kManyMost = 2;
constexpr int kDeepLeast = 2, kDeepMost = 5;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// What a pass costs when nothing disturbs it: the lower quartile. (A stolen core costs a whole time slice, and such
// moments come in runs; they strike every schedule alike.)
double quartile(std::vector<double> times) {
  if (times.empty()) throw std::logic_error("a calibration has ended before everything was measured");
  const auto at = times.begin() + long(times.size() / 4);
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

std::map<int, double> quartiles(const Times& times) {
  std::map<int, double> seconds;
  for (const auto& [rows, measured] : times) seconds[rows] = quartile(measured);
  return seconds;
}

// By a thread that is pinned, so it must not be the caller's.
class ModelBench : public Bench {
 public:
  ModelBench(std::shared_ptr<const CpuModel> model, int threads)
      : model_(std::move(model)), threads_(threads), all_(model_, make_shared_team(threads)) {
    all_.team().pin_caller();
  }

  double now() override { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }
  double draft(bool draw) override { return (drafting_ ? *drafting_ : all_).step(draw, kContext); }
  double verify(int rows, int context) override { return (verifying_ ? *verifying_ : all_).verify(rows, context); }
  bool short_handed() override { return all_.team().active() < all_.team().size(); }
  void part() override {
    const std::vector<int> cores = usable_cores().order;
    const int others = std::max(threads_ - 1, 1);
    drafting_ = std::make_unique<TimedText>(model_, std::make_unique<Team>(1, cores_from(cores, 0, 1)), false);
    verifying_ = std::make_unique<TimedText>(model_, std::make_unique<Team>(others, cores_from(cores, 1, others)));
  }
  void work_on(int stage) override { (stage == 0 ? *drafting_ : *verifying_).team().pin_caller(); }

 private:
  const std::shared_ptr<const CpuModel> model_;
  const int threads_;
  TimedText all_;
  std::unique_ptr<TimedText> drafting_, verifying_;
};

// Rounds as they are decoded: what is in the cache at each step depends on those before it. Kinds of rounds take turns,
// so that a slow moment of the machine hits all of them.
StageCosts measure_turns(Bench* bench, double seconds, bool* crowded) {
  std::vector<double> row_steps, draft_steps, first_drafts, plain_steps;
  Times passes;
  int rounds = 0, short_handed = 0;
  const double end = bench->now() + seconds;
  for (int repeat = 0; repeat < kLeast || (repeat < kMost && bench->now() < end); ++repeat)
    for (int rows : kRows) {
      first_drafts.push_back(bench->draft(true));
      double more = 0.0;
      for (int draft = 0; draft < kMoreDrafts; ++draft) more += bench->draft(true);
      draft_steps.push_back(more / kMoreDrafts);
      row_steps.push_back(bench->draft(false));
      passes[rows].push_back(bench->verify(rows, kContext));
      rounds += 1;
      short_handed += bench->short_handed();
      if (rows != kRows[0]) continue;
      for (int plain = 0; plain < kPlainSteps; ++plain) {
        const double took = bench->draft(false) + bench->verify(1, kContext);
        if (plain > 0) plain_steps.push_back(took);   // the first one still finds what drafting has left
      }
    }
  for (int repeat = 0; repeat < kManyLeast || (repeat < kManyMost && bench->now() < end + seconds); ++repeat)
    for (int rows : kManyRows) passes[rows].push_back(bench->verify(rows, kContext));
  *crowded = short_handed > kShortHanded * rounds;
  StageCosts costs;
  costs.row_step = quartile(row_steps);
  costs.draft_step = quartile(draft_steps);
  costs.verify = {{RowTable::between(quartiles(passes), RowTable::kMost), {}}};
  costs.first_draft = quartile(first_drafts);
  costs.plain = quartile(plain_steps);
  return costs;
}

// What each row of the text beyond kContext adds to a pass, into `costs`; and to a step, by its share of the layers.
void measure_depth(Bench* bench, double seconds, double step_share, StageCosts* costs) {
  Times near, deep;
  const double end = bench->now() + seconds;
  for (int repeat = 0; repeat < kDeepLeast || (repeat < kDeepMost && bench->now() < end); ++repeat)
    for (const int rows : kDeepRows) {
      bench->verify(1, kContext);   // what the cache holds is then the same for both
      near[rows].push_back(bench->verify(rows, kContext));
      deep[rows].push_back(bench->verify(rows, kDeep));
    }
  std::map<int, double> slopes{{0, 0.0}};
  for (const int rows : kDeepRows)
    slopes[rows] = std::max((quartile(deep[rows]) - quartile(near[rows])) / (kDeep - kContext), 0.0);
  costs->verify[0].deeper = RowTable::between(slopes);
  costs->step_deeper = costs->verify[0].deeper(1) * step_share;
}

// Side by side, each on its own threads. Both go on until both have been timed often enough: where cores are busy, either
// thread may get none for as long as the other one needs for everything.
StageCosts measure_overlapped(Bench* bench, double seconds) {
  std::vector<double> row_steps, draft_steps;
  Times passes;
  std::atomic<int> drafted{0};
  std::atomic<bool> over{false};
  bench->part();
  std::future<void> drafting = std::async(std::launch::async, [&] {
    bench->work_on(0);
    while (!over.load()) {
      row_steps.push_back(bench->draft(false));
      draft_steps.push_back(bench->draft(true));
      drafted.fetch_add(1);
    }
  });
  struct End {   // before `drafting` waits for its thread, whatever has been thrown here
    std::atomic<bool>* over;
    ~End() { over->store(true); }
  } end{&over};
  const auto pass = [&](int rows) {
    if (drafting.wait_for(std::chrono::seconds(0)) == std::future_status::ready) drafting.get();   // throws what it has thrown
    return bench->verify(rows, kContext);
  };
  bench->work_on(1);
  while (drafted.load() == 0) pass(1);   // not counted: nothing is beside them
  const double until = bench->now() + seconds;
  for (int repeat = 0; std::min(repeat, drafted.load()) < kLeast || (repeat < kMost && bench->now() < until); ++repeat)
    for (int rows : kRows) passes[rows].push_back(pass(rows));
  over.store(true);
  drafting.get();
  StageCosts costs;
  costs.row_step = quartile(row_steps);
  costs.draft_step = quartile(draft_steps);
  costs.verify = {{RowTable::between(quartiles(passes)), {}}};
  return costs;
}

// A plain step is a row and its pass. Where the two were measured in moments as different as that, neither says much.
bool plausible(const StageCosts& costs) {
  const double parts = costs.row_step + costs.pass(1);
  return costs.plain < 1.5 * parts && parts < 1.5 * costs.plain;
}

RowTable times(const RowTable& table, double factor) {
  std::vector<double> seconds = table.seconds();
  for (double& cost : seconds) cost *= factor;
  return RowTable(std::move(seconds));
}

}  // namespace

Costs calibrate(Bench* bench, int threads, bool overlap, double step_share) {
  Costs costs;
  for (int doubt = 0; doubt == 0 || (doubt <= kDoubts && !plausible(costs.turns)); ++doubt)
    costs.turns = measure_turns(bench, 0.6 * kSeconds, &costs.crowded);
  measure_depth(bench, kSeconds, step_share, &costs.turns);
  if (overlap) {
    StageCosts beside = measure_overlapped(bench, 0.4 * kSeconds);
    // One stage has all threads but one then: what it computes takes so much longer.
    beside.step_deeper = costs.turns.step_deeper * threads;
    beside.verify[0].deeper = times(costs.turns.verify[0].deeper, beside.pass(1) / costs.turns.pass(1));
    costs.overlapped = std::move(beside);
  }
  check(costs);
  return costs;
}

Costs calibrate(const std::shared_ptr<const CpuModel>& model, int threads, bool overlaps) {
  if (!model->drafts()) throw std::runtime_error("there is nothing to calibrate without an exit head");
  const bool overlap = overlaps && threads > 1 && !model->eagle;
  const double late = model->shape.num_layers - model->exit_layer;
  const int own = model->eagle ? int(model->eagle->layers.size()) : int(model->exit_layers.size());
  const double step_share = double(model->exit_layer + own) / late;
  return std::async(std::launch::async, [&] {   // on a thread of its own: it gets pinned, and the caller's must not be
    ModelBench bench(model, threads);
    return calibrate(&bench, threads, overlap, step_share);
  }).get();
}

// -- a made-up text ----------------------------------------------------------------------------------------------------

TimedText::TimedText(std::shared_ptr<const CpuModel> model, std::unique_ptr<Team> team, bool late)
    : passes_(std::move(model), std::move(team), {}, late),
      sampler_(*passes_.model().kernels, passes_.model().shape.vocab_size, passes_.members()),
      vocabulary_(passes_.draft_vocabulary()) {
  sampler_.begin({}, 0);
  for (int i = 0; i < kPassRows * passes_.model().shape.hidden_size; ++i) states_.push_back(float(i * 37 % 101) / 101.0f - 0.5f);
  feedback_.hidden.assign(states_.begin(), states_.begin() + passes_.model().shape.hidden_size + ptrdiff_t(passes_.tap_width()));
}

// In memory that is really there.
void TimedText::reserve(int rows) {
  if (blocks_ && rows <= blocks_->rows()) return;
  blocks_ = std::make_unique<TextBlocks>(passes_.block_bytes(), std::max(rows, kDeep + kPassRows));
  blocks_->fill();
  passes_.reserve(blocks_->rows(), 0);
}

// The EAGLE-3 head reads the text before, once; then its newest row is to be drafted from once more.
void TimedText::follow(int context) {
  const size_t width = passes_.tap_width();
  const std::vector<int> ids(size_t(context) + 1);
  eagle_.know(0, ids.data(), context + 1);
  if (std::exchange(followed_, context) != context) {
    const std::vector<float> taps(size_t(kPassRows) * width);
    for (int row = 0; row < context; row += kPassRows) {
      const int rows = std::min(kPassRows, context - row);
      const Segment segment = blocks_->segment(row, rows);
      eagle_.verified(row, rows, taps.data(), width);
      passes_.read_taps(&eagle_, segment.blocks, segment.spans);
    }
  }
  eagle_.expect_again(std::exchange(verified_, 0), width);
}

double TimedText::step(bool draw, int context) {
  reserve(context + kPassRows);
  if (passes_.model().eagle) follow(context);
  feedback_.position = context - 1;
  x_.resize(states_.size());
  const int id = context % passes_.model().shape.vocab_size;
  const Segment segment = blocks_->segment(context, 1);
  std::vector<ModelBackend::Draw> draws{
      {segment, x_.data(), passes_.uses_feedback() ? &feedback_ : nullptr, &sampler_, &vocabulary_, &eagle_, {}, {}}};
  const auto begin = Clock::now();
  passes_.embed(&id, 1, x_.data());
  passes_.early({segment}, x_.data(), nullptr);
  if (draw) passes_.draw(&draws, nullptr);
  return since(begin);
}

double TimedText::verify(int rows, int context) {
  reserve(context + kPassRows);
  const size_t hidden = size_t(passes_.model().shape.hidden_size);
  x_ = states_;
  std::vector<Head::Row> choosing;
  for (int row = 0; row < rows; ++row) choosing.push_back({x_.data() + size_t(row) * hidden, &sampler_, context + row + 1});
  const auto begin = Clock::now();
  passes_.verify({blocks_->segment(context, rows)}, x_.data(), choosing, nullptr);
  verified_ = kVerified;
  return since(begin);
}

}  // namespace ppsd
