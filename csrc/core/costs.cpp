#include "costs.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <tuple>

namespace ppsd {
namespace {

constexpr double kShortest = 0.5;   // share of a cost that a shorter text leaves at least: slopes may be somewhat wrong
constexpr double kLeastSeconds = 1e-12, kMostSeconds = 3600.0;   // nothing that runs is outside
constexpr double kMostOfAnyUnit = 1e15;                          // sums and products stay finite

double deeper(double seconds, double more) { return std::max(seconds + more, kShortest * seconds); }

struct Check {
  double least, most;

  void operator()(const char* name, double cost, double at_least) const {   // NaN is not between anything
    if (!(cost >= at_least && cost <= most))
      throw std::invalid_argument(std::string("a cost that cannot be: ") + name + " of " + std::to_string(cost));
  }
  void operator()(const char* name, const RowTable& table, double at_least) const {
    double fewer = at_least;
    for (double cost : table.seconds()) {
      if (cost < fewer && cost >= at_least)
        throw std::invalid_argument(std::string("a cost that cannot be: ") + name + " that falls with more rows");
      (*this)(name, cost, at_least);
      fewer = cost;
    }
  }
  void operator()(const StageCosts& costs) const {
    (*this)("row_step", costs.row_step, least);
    (*this)("draft_step", costs.draft_step, least);
    (*this)("row_step", costs.steps, least);
    for (const PassCosts& stage : costs.verify) {
      (*this)("verify", stage.seconds, least);
      (*this)("verify_deeper", stage.deeper, 0.0);
    }
    (*this)("first_draft", costs.first_draft, 0.0);
    (*this)("plain", costs.plain, 0.0);
    (*this)("step_deeper", costs.step_deeper, 0.0);
    for (double link : costs.links) (*this)("links", link, 0.0);
    (*this)("link_row", costs.link_row, 0.0);
    (*this)("draft_interference", costs.draft_interference, 1.0);
    (*this)("verify_interference", costs.verify_interference, 1.0);
  }
};

void check_rows(const char* name, const RowTable& table) {
  if (table.size() < kMaxRows || table.size() > RowTable::kMost)
    throw std::invalid_argument(std::string("a cost that cannot be: ") + name + " of " + std::to_string(table.size()) +
                                " numbers of rows, not " + std::to_string(kMaxRows) + " to " + std::to_string(RowTable::kMost));
}

void check_shape(const StageCosts& costs) {
  if (!costs.steps.empty()) check_rows("row_step", costs.steps);
  if (costs.verify.empty()) throw std::invalid_argument("costs need at least one verification stage");
  for (const PassCosts& stage : costs.verify) {
    check_rows("verify", stage.seconds);
    if (!stage.deeper.empty()) check_rows("verify_deeper", stage.deeper);
  }
  if (!costs.links.empty() && int(costs.links.size()) != costs.stages() + 1)
    throw std::invalid_argument("costs of " + std::to_string(costs.stages()) + " verification stages have " +
                                std::to_string(costs.stages() + 1) + " links, not " + std::to_string(costs.links.size()));
}

}  // namespace

RowTable RowTable::between(std::map<int, double> measured, int rows) {
  for (auto more = std::next(measured.rbegin()), at = measured.rbegin(); more != measured.rend(); at = more++)
    more->second = std::min(more->second, at->second);
  std::vector<double> table;
  auto at = measured.begin();
  for (int r = 1; r <= rows; ++r) {
    while (std::next(at) != measured.end() && std::next(at)->first <= r) ++at;
    const auto next = std::next(at);
    const bool last = next == measured.end() || r < at->first;
    table.push_back(last ? at->second : at->second + (next->second - at->second) * (r - at->first) / (next->first - at->first));
  }
  return RowTable(std::move(table));
}

StageCosts StageCosts::after(int context) const {
  const double more = context - kContext;
  StageCosts out = *this;
  out.row_step = deeper(row_step, more * step_deeper);
  out.draft_step = deeper(draft_step, more * step_deeper);
  if (!steps.empty()) {
    std::vector<double> seconds;
    for (int rows = 1; rows <= steps.size(); ++rows) seconds.push_back(deeper(steps(rows), more * rows * step_deeper));
    out.steps = RowTable(std::move(seconds));
  }
  if (first_draft > 0.0) out.first_draft = deeper(first_draft, more * step_deeper);
  double slope = step_deeper;
  for (PassCosts& stage : out.verify) {
    if (stage.deeper.empty()) continue;
    slope += stage.deeper(1);
    std::vector<double> seconds = stage.seconds.seconds();
    for (int rows = 1; rows <= int(seconds.size()); ++rows)
      seconds[size_t(rows) - 1] = deeper(seconds[size_t(rows) - 1], more * stage.deeper(rows));
    stage.seconds = RowTable(std::move(seconds));
  }
  if (plain > 0.0) out.plain = deeper(plain, more * slope);
  return out;
}

double StageCosts::pass(int rows) const {
  double seconds = 0.0;
  for (const PassCosts& stage : verify) seconds += stage.seconds(rows);
  for (double link : links) seconds += link;
  return seconds + stages() * rows * link_row;
}

double StageCosts::step(int rows, bool draw) const {
  if (rows == 0) return draw ? std::max(draft_step - row_step, 0.0) : 0.0;
  if (!draw) return steps.empty() ? rows * row_step : steps(rows);
  return (steps.empty() ? (rows - 1) * row_step : steps(rows) - steps(1)) + draft_step;
}

bool StageCosts::operator==(const StageCosts& other) const {
  const auto all = [](const StageCosts& c) {
    return std::tie(c.row_step, c.draft_step, c.steps, c.verify, c.first_draft, c.plain, c.step_deeper, c.links, c.link_row,
                    c.draft_interference, c.verify_interference);
  };
  return all(*this) == all(other);
}

void check(const StageCosts& costs) {
  check_shape(costs);
  Check{0.0, kMostOfAnyUnit}(costs);
  if (!(costs.plain_step() > 0.0)) throw std::invalid_argument("costs of nothing at all: give the seconds of a pass");
}

void check(const Costs& costs) {
  const Check measured{kLeastSeconds, kMostSeconds};
  for (const StageCosts* stages : {&costs.turns, costs.overlapped ? &*costs.overlapped : nullptr}) {
    if (stages == nullptr) continue;
    check_shape(*stages);
    measured(*stages);
  }
}

}  // namespace ppsd
