#include "policy.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ppsd {

using Clock = std::chrono::steady_clock;

Schedule fitted(Schedule schedule, bool siblings, bool overlap) {
  if (!siblings) schedule.siblings = 0.0;
  schedule.max_chunk = std::min(schedule.max_chunk, kMaxChunk);
  schedule.lookahead = std::min(schedule.lookahead, kPassRows - 1);
  schedule.overlap = schedule.overlap && overlap;
  if (schedule.overlap) return schedule;
  schedule.lookahead = std::min(schedule.lookahead, schedule.max_chunk);
  schedule.first_chunk = schedule.lookahead;
  return schedule;
}

Policy::Policy(bool drafts, double draft_share, bool over_ranks) : drafts_(drafts) {
  times.draft_share = draft_share;
  times.margin = over_ranks ? tuning_.margin_over_ranks : tuning_.margin;
}

void Policy::plan(std::vector<Writer>* writers, const Pass& pass) {
  int left = pass.left;
  if (pass.alone && !writers->empty()) {
    Writer& only = writers->front();
    if (steer(&only, pass.idle)) return;
    if (!only.drafting->automatic) {
      only.schedule = fitted(only.drafting->asked, true, pass.idle);
      return;
    }
  }
  std::vector<Writer*> drawing;
  std::vector<double> acceptance;
  const double pooled = (tuning_.prior_acceptance * tuning_.prior_weight + accepted_) / (tuning_.prior_weight + judged_);
  int others = pass.prompt_rows, copying = 0, committed = 0;
  for (Writer& writer : *writers) {
    Drafting& drafting = *writer.drafting;
    drafting.steered = false;
    if (drafting.automatic) copying += drafting.asked.copies();
    if (drafting.automatic && drafts_ && earned(writer) > 0.0) {
      drawing.push_back(&writer);
      acceptance.push_back((tuning_.pooled * pooled + drafting.accepted) / (tuning_.pooled + drafting.judged));
      continue;
    }
    ++others;
    ++committed;
    if (drafting.automatic) continue;
    keep_schedule(&writer, pass, left);
    left -= std::max(writer.schedule.max_chunk, writer.schedule.lookahead);
    others += writer.schedule.max_chunk;
  }
  allotment_ = allot(times, acceptance, others, committed, left, kMaxChunk, pass.reading, copying);
  for (int drafts : allotment_.drafts) left -= drafts;
  for (Writer& writer : *writers) {
    Drafting& drafting = *writer.drafting;
    drafting.row_price = allotment_.row_seconds * allotment_.tokens_per_second;
    drafting.draft_price = allotment_.draft_seconds * allotment_.tokens_per_second;
    if (!drafting.automatic) continue;
    const auto found = std::find(drawing.begin(), drawing.end(), &writer);
    const int drafts = found == drawing.end() ? 0 : allotment_.drafts[size_t(found - drawing.begin())];
    int copies = 0;
    if (drafting.asked.copies() && earned(writer) > 0.0 && allotment_.copies) {
      copies = std::min({tuning_.copies, left / copying, kMaxChunk - drafts});
      --copying;
    }
    left -= copies;
    give(&writer, drafts, copies);
  }
}

// By its planner, if it has one.
bool Policy::steer(Writer* writer, bool idle) {
  Drafting& drafting = *writer->drafting;
  if (!drafting.planner) return false;
  if (!std::exchange(drafting.steered, true)) {
    drafting.planner->begin(writer->text);
    drafting.since = Clock::now();
  }
  writer->schedule = fitted(drafting.planner->schedule(), true, idle);
  return true;
}

// Plain tokens that its drafts may still lose.
double Policy::earned(const Writer& writer) const {
  return writer.drafting->balance + tuning_.overdraft + tuning_.loss_share * writer.written;
}

void Policy::keep_schedule(Writer* writer, const Pass& pass, int left) const {
  Schedule& schedule = writer->schedule = writer->drafting->asked;
  schedule.max_chunk = std::min(schedule.max_chunk, left);
  schedule = fitted(schedule, false, pass.idle && std::max(schedule.max_chunk, schedule.lookahead) <= left);
  if (schedule.max_chunk == 0) schedule.lookup = 0, schedule.recycle = false;
}

void Policy::give(Writer* writer, int drafts, int copies) const {
  Schedule& schedule = writer->schedule = {};
  schedule.lookahead = schedule.first_chunk = drafts;
  schedule.max_chunk = drafts + copies;
  if (copies > 0) {
    schedule.lookup = writer->drafting->asked.lookup;
    schedule.recycle = writer->drafting->asked.recycle;
  }
  const auto worth = [&](double seconds) {
    return std::clamp(seconds * allotment_.tokens_per_second, tuning_.least_chance, tuning_.sure_chance);
  };
  schedule.stop_rule.kind = StopRule::Kind::kSurvival;
  schedule.stop_rule.threshold = worth(allotment_.draft_seconds);
  schedule.stop_rule.copy_threshold = worth(kTuning.copies * allotment_.row_seconds);
}

void Policy::learn(Drafting* drafting, const Round& round, bool in_flight) {
  for (int i = 0; i < int(round.judged.size()); ++i) {
    if (round.judged[i].copied > 0) continue;
    const double good = i < round.accepted ? 1.0 : 0.0;
    for (auto [accepted, judged] : {std::pair{&accepted_, &judged_}, std::pair{&drafting->accepted, &drafting->judged}}) {
      *accepted = tuning_.fades * *accepted + good;
      *judged = tuning_.fades * *judged + 1.0;
    }
  }
  if (drafting->steered) {
    const Clock::time_point now = Clock::now();
    const bool overlapped = drafting->left_over || drafting->planner->schedule().overlap;
    const double seconds = std::chrono::duration<double>(now - std::exchange(drafting->since, now)).count();
    const Schedule& next = drafting->planner->after(round, seconds, drafting->left_over);
    drafting->left_over = overlapped && !next.overlap && in_flight;
    return;
  }
  const int drafts = int(round.judged.size()) + round.dropped, drawn = drafts - round.copied;
  drafting->balance += round.accepted - drawn * drafting->draft_price - round.copied * drafting->row_price;
  drafting->balance = std::min(drafting->balance, tuning_.overdraft);   // so that credit does not accumulate
}

Allotment allot(const PassTimes& times, const std::vector<double>& acceptance, int others, int writing, int left, int most,
                int reading, int copying) {
  constexpr int kRefinements = 3;   // of what a second is worth, which depends on the drafts that it decides
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
