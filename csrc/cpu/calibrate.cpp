#include "calibrate.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <stdexcept>

#include "../pipeline/tuning.h"

namespace ppsd {
namespace {

using Clock = std::chrono::steady_clock;
using Passes = std::map<int, std::vector<double>>;   // seconds, by the number of rows

constexpr Tuning kTuning;
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

std::map<int, double> quartiles(const Passes& times) {
  std::map<int, double> seconds;
  for (const auto& [rows, measured] : times) seconds[rows] = quartile(measured);
  return seconds;
}

// The stages of an engine; its thread is pinned, so it must not be the caller's.
class EngineBench : public Bench {
 public:
  explicit EngineBench(CpuEngine* engine) : engine_(engine) {
    engine->begin({}, kDeep + RowTable::kMost + 1);
    engine->use_shared_team();
    engine->shared_team().pin_caller();
    for (int i = 0; i < kContext + RowTable::kMost; ++i) ids_.push_back(i % engine->model().shape.vocab_size);
    auto newest = std::make_shared<Feedback>();
    newest->position = kContext - 1;
    run_prompt(engine->stages(), ids_, 0, nullptr, &newest->hidden);
    feedback_ = std::move(newest);
    for (int rows = 0; rows <= RowTable::kMost; ++rows) {
      chunks_[rows].start = kContext;
      chunks_[rows].ids.assign(ids_.begin() + kContext, ids_.begin() + kContext + rows);
      engine->draft().export_hidden(&chunks_[rows]);
    }
    draft(true);   // the exit head's own layers catch up with the context
  }
  ~EngineBench() override { engine_->use_shared_team(); }

  double now() override { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }
  double draft(bool draw) override {
    DraftStep step;
    step.start = kContext;
    step.ids = {ids_[kContext]};
    step.feedback = feedback_;
    Draft draft;
    if (EagleText* text = engine_->draft().text()) {
      text->know(kContext, step.ids.data(), 1);
      text->expect_again(std::exchange(verified_, 0), engine_->model().eagle->tap_width());
    }
    const auto begin = Clock::now();
    engine_->draft().step(step, draw ? &draft : nullptr, nullptr);
    return since(begin);
  }
  double verify(int rows, int context) override {
    Chunk chunk = chunks_[rows];
    chunk.start = context;
    engine_->verify().pretend(context);
    const auto begin = Clock::now();
    engine_->verify().run(&chunk, nullptr);
    engine_->verify().choose(chunk, rows);
    verified_ = kVerified;
    return since(begin);
  }
  bool short_handed() override { return engine_->shared_team().active() < engine_->shared_team().size(); }
  void lengthen() override { engine_->verify().fill(); }
  void part() override { engine_->use_own_teams(); }
  void work_on(int stage) override { engine_->pin_stage(stage); }

 private:
  CpuEngine* engine_;
  std::vector<int> ids_;
  std::shared_ptr<const Feedback> feedback_;   // `feedback` heads pay for it
  int verified_ = 0;   // rows since the last draft
  std::array<Chunk, RowTable::kMost + 1> chunks_;   // by the number of rows
};

// Rounds as they are decoded: what is in the cache at each step depends on those before it. Kinds of rounds take turns,
// so that a slow moment of the machine hits all of them.
StageCosts measure_turns(Bench* bench, double seconds, bool* crowded) {
  std::vector<double> row_steps, draft_steps, first_drafts, plain_steps;
  Passes passes;
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
  *crowded = short_handed > kTuning.short_handed * rounds;
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
  bench->lengthen();
  Passes near, deep;
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
  Passes passes;
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
  for (int doubt = 0; doubt == 0 || (doubt <= kTuning.doubts && !plausible(costs.turns)); ++doubt)
    costs.turns = measure_turns(bench, 0.6 * kTuning.seconds, &costs.crowded);
  measure_depth(bench, kTuning.seconds, step_share, &costs.turns);
  if (overlap) {
    StageCosts beside = measure_overlapped(bench, 0.4 * kTuning.seconds);
    // One stage has all threads but one then: what it computes takes so much longer.
    beside.step_deeper = costs.turns.step_deeper * threads;
    beside.verify[0].deeper = times(costs.turns.verify[0].deeper, beside.pass(1) / costs.turns.pass(1));
    costs.overlapped = std::move(beside);
  }
  check(costs);
  return costs;
}

Costs calibrate(CpuEngine* engine, bool overlaps) {
  const CpuModel& model = engine->model();
  if (!model.drafts()) throw std::runtime_error("there is nothing to calibrate without an exit head");
  const bool overlap = overlaps && engine->threads() > 1 && !model.eagle;
  const double late = model.shape.num_layers - model.exit_layer;
  const int own = model.eagle ? int(model.eagle->layers.size()) : int(model.exit_layers.size());
  const double step_share = double(model.exit_layer + own) / late;
  return std::async(std::launch::async, [&] {   // on a thread of its own: it gets pinned, and the caller's must not be
    EngineBench bench(engine);
    return calibrate(&bench, engine->threads(), overlap, step_share);
  }).get();
}

}  // namespace ppsd
