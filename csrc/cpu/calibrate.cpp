#include "calibrate.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../pipeline/simulated.h"
#include "../pipeline/toy_stages.h"

namespace ppsd {
namespace {

using Clock = std::chrono::steady_clock;
using Passes = std::array<std::vector<double>, kMaxRows + 1>;   // seconds, by the number of rows

constexpr int kContext = Costs::kContext;         // rows before those that are timed
constexpr int kDeep = 1024;                       // the same, to learn what a longer text costs
constexpr int kDeepRows[] = {1, 4, 16};
constexpr int kDeepRepeats = 5;
constexpr int kRows[] = {1, 2, 3, 4, 6, 8, 12, 16};   // those between are interpolated
constexpr int kMoreDrafts = 3;                    // of a round, behind the first one
constexpr int kPlainSteps = 3;                    // behind each other
constexpr int kDoubts = 3;                        // measurements more, where one cannot be
constexpr double kShortHanded = 0.2;              // share of the rounds on fewer threads that tells of a crowded moment
constexpr int kLeast = 3, kMost = 15;             // repeats of every kind; the latter if there is time
constexpr double kLeastCost = 1e-12, kMostCost = 3600.0;   // seconds: nothing that runs is outside, and sums stay finite

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// What a pass costs when nothing disturbs it: the lower quartile. (A stolen core costs a whole time slice, and such
// moments come in runs; they strike every schedule alike.)
double quartile(std::vector<double> times) {
  if (times.empty()) throw std::logic_error("a calibration has ended before everything was measured");
  const auto at = times.begin() + long(times.size() / 4);
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

// The times of one kind of pass at each number of rows, as a table: fewer rows never cost more.
Costs::Table table_of(const Passes& times) {
  Costs::Table table{};
  int known = kMaxRows;
  table[known] = quartile(times[known]);
  for (auto rows = std::rbegin(kRows) + 1; rows != std::rend(kRows); ++rows) {
    const double seconds = std::min(quartile(times[*rows]), table[known]);
    for (int r = *rows; r < known; ++r) table[r] = seconds + (table[known] - seconds) * (r - *rows) / (known - *rows);
    known = *rows;
  }
  return table;
}

// The stages of an engine that has no session; its thread is pinned, so it must not be the caller's.
class EngineBench : public Bench {
 public:
  explicit EngineBench(CpuEngine* engine) : engine_(engine) {
    Request request;
    request.limits.end = kDeep + kMaxRows + 1;
    stages_ = engine->begin(request, 0);
    engine->use_shared_team();
    engine->pin_shared();
    for (int i = 0; i < kContext + kMaxRows; ++i) ids_.push_back(i % engine->model().shape.vocab_size);
    auto newest = std::make_shared<Feedback>();
    newest->position = kContext - 1;
    run_prompt(stages_, ids_, 0, nullptr, &newest->hidden);
    feedback_ = std::move(newest);
    for (int rows = 0; rows <= kMaxRows; ++rows) {
      chunks_[rows].start = kContext;
      chunks_[rows].ids.assign(ids_.begin() + kContext, ids_.begin() + kContext + rows);
      stages_.draft->export_hidden(&chunks_[rows]);
    }
    draft(true);   // the exit head's own layers catch up with the context
  }
  ~EngineBench() override {
    engine_->use_shared_team();
    engine_->remember({});   // these rows are nobody's text
  }

  double now() override { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }
  double draft(bool draw) override {
    DraftStep step;
    step.start = kContext;
    step.ids = {ids_[kContext]};
    step.feedback = feedback_;
    Draft draft;
    const auto begin = Clock::now();
    stages_.draft->step(step, draw ? &draft : nullptr, nullptr);
    return since(begin);
  }
  double verify(int rows, int context) override {
    Chunk chunk = chunks_[rows];
    chunk.start = context;
    for (const auto& stage : engine_->verify()) stage->pretend(context);
    const auto begin = Clock::now();
    for (VerifyStage* stage : stages_.verify) stage->run(&chunk, nullptr);
    stages_.verify.back()->choose(chunk, rows);
    return since(begin);
  }
  bool short_handed() override { return engine_->shared_team().active() < engine_->shared_team().size(); }
  void lengthen() override {
    for (const auto& stage : engine_->verify()) stage->fill();
  }
  void part() override { engine_->use_own_teams(); }
  void work_on(int stage) override { engine_->pin_stage(stage); }

 private:
  CpuEngine* engine_;
  Stages stages_;
  std::vector<int> ids_;
  std::shared_ptr<const Feedback> feedback_;   // heads that hear of verified rows pay for it
  std::array<Chunk, kMaxRows + 1> chunks_;
};

// Rounds as they are decoded: what is in the cache at each step depends on those before it. Kinds of rounds take turns,
// so that a slow moment of the machine hits all of them.
Costs::Stages measure_turns(Bench* bench, double seconds, bool* crowded) {
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
  *crowded = short_handed > kShortHanded * rounds;
  return {quartile(row_steps), quartile(draft_steps), table_of(passes), quartile(first_drafts), quartile(plain_steps)};
}

// What each row of the text beyond kContext adds to a pass, into `stages`; and to a step, by its share of the layers.
void measure_depth(Bench* bench, double step_share, Costs::Stages* stages) {
  bench->lengthen();
  Passes near, deep;
  for (int repeat = 0; repeat < kDeepRepeats; ++repeat)
    for (const int rows : kDeepRows) {
      bench->verify(1, kContext);   // what the cache holds is then the same for both
      near[rows].push_back(bench->verify(rows, kContext));
      deep[rows].push_back(bench->verify(rows, kDeep));
    }
  int below = 0;
  for (const int rows : kDeepRows) {
    Costs::Table& slopes = stages->verify_deeper;
    slopes[rows] = std::max((quartile(deep[rows]) - quartile(near[rows])) / (kDeep - kContext), slopes[below]);
    for (int r = below + 1; r < rows; ++r)
      slopes[r] = slopes[below] + (slopes[rows] - slopes[below]) * (r - below) / (rows - below);
    below = rows;
  }
  stages->step_deeper = stages->verify_deeper[1] * step_share;
}

// Side by side, each on its own threads. Both go on until both have been timed often enough: where cores are busy, either
// thread may get none for as long as the other one needs for everything.
Costs::Stages measure_overlapped(Bench* bench, double seconds) {
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
  Costs::Stages stages;
  stages.row_step = quartile(row_steps);
  stages.draft_step = quartile(draft_steps);
  stages.verify = table_of(passes);
  return stages;
}

// A plain step is a row and its pass. Where the two were measured in moments as different as that, neither says much.
bool plausible(const Costs::Stages& stages) {
  const double parts = stages.row_step + stages.verify[1];
  return stages.plain < 1.5 * parts && parts < 1.5 * stages.plain;
}

// NaN is not between anything.
void check(const char* name, double seconds, double least) {
  if (!(seconds >= least && seconds <= kMostCost))
    throw std::invalid_argument(std::string("a cost that cannot be: ") + name + " of " + std::to_string(seconds) + " s");
}
void check(const char* name, const Costs::Table& table, double least) {
  for (int rows = 1; rows <= kMaxRows; ++rows) check(name, table[rows], rows == 1 ? least : std::max(least, table[rows - 1]));
}
void check(const Costs::Stages& stages) {
  check("row_step", stages.row_step, kLeastCost);
  check("draft_step", stages.draft_step, kLeastCost);
  check("verify", stages.verify, kLeastCost);
  check("first_draft", stages.first_draft, 0.0);
  check("plain", stages.plain, 0.0);
  check("step_deeper", stages.step_deeper, 0.0);
  check("verify_deeper", stages.verify_deeper, 0.0);
}

}  // namespace

void check(const Costs& costs) {
  check(costs.turns);
  if (costs.can_overlap) check(costs.overlapped);
}

Costs calibrate(Bench* bench, int threads, bool overlap, double step_share, double seconds) {
  Costs costs;
  costs.can_overlap = overlap;
  costs.turns = measure_turns(bench, 0.6 * seconds, &costs.crowded);
  for (int again = 0; again < kDoubts && !plausible(costs.turns); ++again)
    costs.turns = measure_turns(bench, 0.6 * seconds, &costs.crowded);
  measure_depth(bench, step_share, &costs.turns);
  if (costs.can_overlap) {
    costs.overlapped = measure_overlapped(bench, 0.4 * seconds);
    // One stage has all threads but one then: what it computes takes so much longer.
    const double slower = costs.overlapped.verify[1] / costs.turns.verify[1];
    costs.overlapped.step_deeper = costs.turns.step_deeper * threads;
    for (int rows = 1; rows <= kMaxRows; ++rows) costs.overlapped.verify_deeper[rows] = costs.turns.verify_deeper[rows] * slower;
  }
  check(costs);
  return costs;
}

Costs calibrate(CpuEngine* engine, double seconds) {
  const CpuModel& model = engine->model();
  if (!model.drafts()) throw std::runtime_error("there is nothing to calibrate without an exit head");
  const bool overlap = engine->threads() > 1 && engine->verify().size() == 1;
  const double late = model.shape.num_layers - model.exit_layer;
  const double step_share = double(model.exit_layer + int(model.exit_layers.size())) / late;
  return std::async(std::launch::async, [&] {   // on a thread of its own: it gets pinned, and the caller's must not be
    EngineBench bench(engine);
    return calibrate(&bench, engine->threads(), overlap, step_share, seconds);
  }).get();
}

double simulate_overlap(const Schedule& schedule, const Costs& costs, double acceptance) {
  constexpr int kTokens = 250;
  const Costs::Stages& c = costs.overlapped;
  SimulatedCosts simulated;
  for (int rows = 1; rows <= kMaxRows; ++rows) {   // the draft stage's few layers cost by the row
    simulated.step[rows] = rows * c.row_step;
    simulated.drawing_step[rows] = (rows - 1) * c.row_step + c.draft_step;
  }
  simulated.drawing_step[0] = std::max(c.draft_step - c.row_step, 0.0);
  simulated.verify = {c.verify};
  simulated.links = {0.0, 0.0};
  const ToyModel model{1};
  ToyDraft draft(model, kTokens + 32, {acceptance}, 2);
  ToyVerify verify(model, kTokens + 32, 0);
  Limits limits;
  limits.end = kTokens + 2;
  Simulated carrier({&draft, {&verify}}, schedule, limits, 0, std::move(simulated), false);
  carrier.begin({1}, 0);
  while (carrier.next()) {
  }
  return kTokens / carrier.seconds();
}

}  // namespace ppsd
