#include "calibrate.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <iterator>
#include <stdexcept>

#include "../pipeline/simulated.h"
#include "../pipeline/toy_stages.h"

namespace ppsd {
namespace {

using Clock = std::chrono::steady_clock;

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

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// What a pass costs when nothing disturbs it: the lower quartile. (A stolen core costs a whole time slice, and such
// moments come in runs; they strike every schedule alike.)
double quartile(std::vector<double> times) {
  if (times.empty()) return 0.0;
  const auto at = times.begin() + long(times.size() / 4);
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

// The times of one kind of pass at each number of rows, as a table: fewer rows never cost more.
Costs::Table table_of(const std::array<std::vector<double>, kMaxRows + 1>& times) {
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

// Stages with the rows of a text, at whose end draft steps and passes are timed again and again.
class Bench {
 public:
  explicit Bench(CpuEngine* engine) : engine_(engine) {
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
  ~Bench() { engine_->remember({}); }   // these rows are nobody's text

  double draft(bool draw) {
    DraftStep step;
    step.start = kContext;
    step.ids = {ids_[kContext]};
    step.feedback = feedback_;
    Draft draft;
    const auto begin = Clock::now();
    stages_.draft->step(step, draw ? &draft : nullptr, nullptr);
    return since(begin);
  }
  double verify(int rows, int context = kContext) {
    Chunk chunk = chunks_[rows];
    chunk.start = context;
    for (const auto& stage : engine_->verify()) stage->pretend(context);
    const auto begin = Clock::now();
    for (VerifyStage* stage : stages_.verify) stage->run(&chunk, nullptr);
    stages_.verify.back()->choose(chunk, rows);
    return since(begin);
  }

 private:
  CpuEngine* engine_;
  Stages stages_;
  std::vector<int> ids_;
  std::shared_ptr<const Feedback> feedback_;   // heads that hear of verified rows pay for it
  std::array<Chunk, kMaxRows + 1> chunks_;
};

struct Times {
  std::vector<double> row_steps, draft_steps, first_drafts, plain_steps;
  std::array<std::vector<double>, kMaxRows + 1> passes;

  Costs::Stages costs() const {
    return {quartile(row_steps), quartile(draft_steps), table_of(passes), quartile(first_drafts), quartile(plain_steps)};
  }
};

// Rounds as they are decoded: what is in the cache at each step depends on those before it. Kinds of rounds take turns,
// so that a slow moment of the machine hits all of them.
Costs::Stages measure_turns(CpuEngine* engine, double seconds, bool* crowded) {
  Bench bench(engine);
  Times times;
  int rounds = 0, short_handed = 0;
  const auto begin = Clock::now();
  for (int repeat = 0; repeat < kLeast || (repeat < kMost && since(begin) < seconds); ++repeat)
    for (int rows : kRows) {
      times.first_drafts.push_back(bench.draft(true));
      double more = 0.0;
      for (int draft = 0; draft < kMoreDrafts; ++draft) more += bench.draft(true);
      times.draft_steps.push_back(more / kMoreDrafts);
      times.row_steps.push_back(bench.draft(false));
      times.passes[rows].push_back(bench.verify(rows));
      rounds += 1;
      short_handed += engine->shared_team().active() < engine->shared_team().size();
      if (rows != kRows[0]) continue;
      for (int plain = 0; plain < kPlainSteps; ++plain) {
        const double took = bench.draft(false) + bench.verify(1);
        if (plain > 0) times.plain_steps.push_back(took);   // the first one still finds what drafting has left
      }
    }
  *crowded = short_handed > kShortHanded * rounds;
  return times.costs();
}

// What each row of the text beyond kContext adds to a pass, into `stages`; and to a step, by its share of the layers.
void measure_depth(CpuEngine* engine, Costs::Stages* stages) {
  Bench bench(engine);
  for (const auto& stage : engine->verify()) stage->fill();
  std::array<std::vector<double>, kMaxRows + 1> near, deep;
  for (int repeat = 0; repeat < kDeepRepeats; ++repeat)
    for (const int rows : kDeepRows) {
      bench.verify(1);   // what the cache holds is then the same for both
      near[rows].push_back(bench.verify(rows));
      deep[rows].push_back(bench.verify(rows, kDeep));
    }
  int below = 0;
  for (const int rows : kDeepRows) {
    Costs::Table& slopes = stages->verify_deeper;
    slopes[rows] = std::max((quartile(deep[rows]) - quartile(near[rows])) / (kDeep - kContext), slopes[below]);
    for (int r = below + 1; r < rows; ++r)
      slopes[r] = slopes[below] + (slopes[rows] - slopes[below]) * (r - below) / (rows - below);
    below = rows;
  }
  const CpuModel& model = engine->model();
  const double late = model.shape.num_layers - model.exit_layer;
  stages->step_deeper = stages->verify_deeper[1] * double(model.exit_layer + int(model.exit_layers.size())) / late;
}

// Side by side, each on its own threads: drafting goes on for as long as there are passes to be timed.
Costs::Stages measure_overlapped(CpuEngine* engine, double seconds) {
  Bench bench(engine);
  engine->use_own_teams();
  Times times;
  std::atomic<bool> over{false};
  std::thread drafting([&] {
    engine->pin_stage(0);
    while (!over.load(std::memory_order_relaxed)) {
      times.row_steps.push_back(bench.draft(false));
      times.draft_steps.push_back(bench.draft(true));
    }
  });
  engine->pin_stage(1);
  const auto begin = Clock::now();
  for (int repeat = 0; repeat < kLeast || (repeat < kMost && since(begin) < seconds); ++repeat)
    for (int rows : kRows) times.passes[rows].push_back(bench.verify(rows));
  over.store(true);
  drafting.join();
  engine->use_shared_team();
  return times.costs();
}

// A plain step is a row and its pass. Where the two were measured in moments as different as that, neither says much.
bool plausible(const Costs::Stages& stages) {
  const double parts = stages.row_step + stages.verify[1];
  return stages.plain < 1.5 * parts && parts < 1.5 * stages.plain;
}

}  // namespace

Costs calibrate(CpuEngine* engine, double seconds) {
  if (!engine->model().drafts()) throw std::runtime_error("there is nothing to calibrate without an exit head");
  Costs costs;
  costs.can_overlap = engine->threads() > 1 && engine->verify().size() == 1;
  std::async(std::launch::async, [&] {   // on a thread of its own: it gets pinned, and the caller's must not be
    costs.turns = measure_turns(engine, 0.6 * seconds, &costs.crowded);
    for (int again = 0; again < kDoubts && !plausible(costs.turns); ++again)
      costs.turns = measure_turns(engine, 0.6 * seconds, &costs.crowded);
    measure_depth(engine, &costs.turns);
    if (!costs.can_overlap) return;
    costs.overlapped = measure_overlapped(engine, 0.4 * seconds);
    // One stage has all threads but one then: what it computes takes so much longer.
    const double slower = costs.overlapped.verify[1] / costs.turns.verify[1];
    costs.overlapped.step_deeper = costs.turns.step_deeper * engine->threads();
    for (int rows = 1; rows <= kMaxRows; ++rows) costs.overlapped.verify_deeper[rows] = costs.turns.verify_deeper[rows] * slower;
  }).get();
  return costs;
}

double simulate_overlap(const Schedule& schedule, const Costs& costs, double acceptance) {
  constexpr int kTokens = 250;
  const Costs::Stages& c = costs.overlapped;
  SimulatedCosts simulated;
  for (int rows = 1; rows <= kMaxRows; ++rows) {   // the draft stage's few layers cost by the row
    simulated.step[rows] = rows * c.row_step;
    simulated.drawing_step[rows] = (rows - 1) * c.row_step + c.draft_step;
  }
  simulated.drawing_step[0] = c.draft_step - c.row_step;
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
