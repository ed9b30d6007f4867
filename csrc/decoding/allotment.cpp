#include "allotment.h"

#include <algorithm>
#include <numeric>

namespace ppsd {
namespace {

constexpr int kRefinements = 3;   // of what a second is worth, which depends on the drafts that it decides

}  // namespace

Allotment allot(const PassTimes& times, const std::vector<double>& acceptance, int others, int writing, int left, int most,
                int reading, int copying) {
  const int answers = int(acceptance.size()), own = answers + others;
  Allotment out;
  out.drafts.assign(size_t(answers), 0);
  const double plain = times.early(own) + times.verify(own);
  if (answers == 0 || plain <= 0.0) return out;   // nothing has been measured: the first rounds are plain
  std::vector<int> order(static_cast<size_t>(answers));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return acceptance[a] > acceptance[b]; });

  const int all = answers + writing + reading;
  const double least = reading > 0 ? all / (times.early(all) + times.verify(all)) : 0.0;
  double worth = std::max((answers + writing) / plain, least);
  for (int turn = 0; turn < kRefinements; ++turn) {
    std::vector<int> drafts(size_t(answers), 0);
    std::vector<double> alive(size_t(answers), 1.0);
    double tokens = answers + writing, seconds = plain;
    int rows = own, candidates = answers, first = 0;
    for (int level = 0; level < most && candidates > 0; ++level) {
      double gain = 0.0, best = 0.0, best_gain = 0.0, best_cost = 0.0;
      int take = 0;
      for (int m = 1; m <= candidates && rows - own + m <= left; ++m) {
        gain += alive[order[m - 1]] * acceptance[order[m - 1]];
        const double cost = times.draw(m) + times.verify(rows + m) - times.verify(rows);
        const double net = gain - times.margin * worth * cost;
        if (net <= best) continue;
        best = net;
        best_gain = gain;
        best_cost = cost;
        take = m;
      }
      for (int i = 0; i < take; ++i) {
        ++drafts[order[i]];
        alive[order[i]] *= acceptance[order[i]];
      }
      tokens += best_gain;
      seconds += best_cost;
      rows += take;
      if (level == 0) first = take;
      candidates = take;
    }
    out.drafts = drafts;
    out.tokens_per_second = worth = std::max(tokens / seconds, least);
    const int last = std::max(rows, own + 1);   // one draft, if there is none
    const double draft_row = (times.verify(last) - times.verify(own)) / (last - own);
    const int drawing = std::max(first, 1);   // who share the step
    out.draft_seconds = times.margin * (draft_row + times.draw(drawing) / drawing);
    double copy_row = draft_row;
    for (int m = 1; m <= copying; ++m) copy_row = std::max(copy_row, (times.verify(own + m) - times.verify(own)) / m);
    out.row_seconds = times.margin * copy_row;
    out.copies = copy_row * worth < 1.0;   // even a sure one must pay; what passes took is known by then
  }
  return out;
}

}  // namespace ppsd
