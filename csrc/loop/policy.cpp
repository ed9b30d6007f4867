#include "policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

namespace ppsd {

using Clock = std::chrono::steady_clock;

Schedule fitted(Schedule schedule, bool overlap) {
  schedule.max_chunk = std::min(schedule.max_chunk, kMaxChunk);
  schedule.lookahead = std::min(schedule.lookahead, kPassRows - 1);
  schedule.overlap = schedule.overlap && overlap;
  if (schedule.overlap) return schedule;
  schedule.lookahead = std::min(schedule.lookahead, schedule.max_chunk);
  schedule.first_chunk = schedule.lookahead;
  return schedule;
}

// `elastic`: drafting never waits. Over ranks its rows leave at once, so that a first wrong draft costs little.
Schedule overlapped(bool ranks) {
  Schedule schedule;
  schedule.first_chunk = ranks ? 0 : 2;
  schedule.max_chunk = 8;
  schedule.lookahead = kMaxChunk;
  schedule.overlap = true;
  return schedule;
}

Policy::Policy(bool drafts, double draft_share, double prior, Stages stages)
    : drafts_(drafts),
      stages_(stages),
      pools_{Pool{kDrafts.prior_weight * prior, kDrafts.prior_weight}, Pool{kDrafts.prior_weight * prior, kDrafts.prior_weight}},
      wait_(stages == Stages::kRanks ? 1 : 64),
      stay_(32) {
  times.draft_share = draft_share;
}

double Policy::acceptance(const Drafting& drafting) const {
  const Pool& pool = pools_[size_t(std::max(drafting.pool, 0))];
  const double weight = drafting.pool < 0 ? kDrafts.prior_weight : kDrafts.pooled;
  const double others = drafting.pool < 0 ? 0.5 : pool.accepted / pool.judged;
  return (weight * others + drafting.accepted) / (weight + drafting.judged);
}

// -- planning ----------------------------------------------------------------------------------------------------------

void Policy::plan(std::vector<Writer>* writers, const RoundBudget& pass) {
  round_seconds_ = 0.0;
  times.margin = pass.alone ? 1.0 : stages_ == Stages::kRanks ? kDrafts.margin_over_ranks : kDrafts.margin;
  const bool alone = pass.alone && writers->size() == 1;
  plain_round_ = probing_ = drafting_round_ = false;
  if (alone && !writers->front().drafting->automatic) {
    writers->front().schedule = fitted(writers->front().drafting->asked, pass.idle);
    return;
  }
  int left = pass.left, others = pass.prompt_rows, copying = 0, committed = 0;
  std::vector<Writer*> drawing;
  std::vector<double> chances;
  for (Writer& writer : *writers) {
    Drafting& drafting = *writer.drafting;
    drafting.alone = alone;
    if (alone && drafting.tokens == 0) {
      drafting.credit = std::clamp(carried_, drafting.credit, kDrafts.carried);
      for (double* sum : {&drafting_.tokens, &drafting_.seconds}) *sum *= kDrafts.another;
    }
    if (!alone) drafting.overlaps = false;
    if (drafting.automatic) copying += drafting.asked.copies();
    if (drafting.automatic && drafts_ && drafting.credit > 0.0) {
      drawing.push_back(&writer);
      chances.push_back(acceptance(drafting));
      continue;
    }
    ++others;
    ++committed;
    if (drafting.automatic) continue;
    keep_schedule(&writer, pass, left);
    left -= std::max(writer.schedule.max_chunk, writer.schedule.lookahead);
    others += writer.schedule.max_chunk;
  }
  allotment_ = allot(times, chances, others, committed, left, kMaxChunk, pass.reading, copying);
  if (alone && writers->front().drafting->overlaps && pass.idle) {
    Schedule& schedule = writers->front().schedule = overlapped(stages_ == Stages::kRanks);
    schedule.lookup = writers->front().drafting->asked.lookup;
    schedule.recycle = writers->front().drafting->asked.recycle;
    return;
  }
  for (int drafts : allotment_.drafts) left -= drafts;
  const int own = int(writers->size()) + pass.prompt_rows, sharing = std::max(int(drawing.size()), 1);
  for (Writer& writer : *writers) {
    Drafting& drafting = *writer.drafting;
    drafting.row_price = allotment_.row_seconds * allotment_.tokens_per_second;
    drafting.draft_price = allotment_.draft_seconds * allotment_.tokens_per_second;
    if (!drafting.automatic) continue;
    const auto found = std::find(drawing.begin(), drawing.end(), &writer);
    int drafts = found == drawing.end() ? 0 : allotment_.drafts[size_t(found - drawing.begin())];
    const bool copies = drafting.asked.copies() && drafting.credit > 0.0 && allotment_.copies;
    int copied = copies ? std::min(affordable(drafting.credit, own, sharing, false), kMaxChunk) : 0;
    if (alone) {
      const int most = std::min(affordable(drafting.credit, own, sharing, true), pass.left);
      if (found != drawing.end()) drafts = wanted(drafting, most);
      drafting_round_ = drafts > 0;
      if (plain_round_ || probing_) copied = 0;
      copied = std::max(std::min(copied, pass.left), drafts) - drafts;
    } else {
      copied = copies ? std::min({copied, left / copying--, kMaxChunk - drafts}) : 0;
      left -= copied;
    }
    give(&writer, drafts, copied, own, sharing);
  }
}

// Of an answer alone, drafts of the round at hand. Now and then it is of the other kind than seems best: two plain rounds after
// many drafting ones say what a plain one takes now, and a draft after many plain ones whether they still do not pay.
// most: what the account can pay.
int Policy::wanted(const Drafting& drafting, int most) {
  const double gain = drafting_rate(acceptance(drafting)).value();
  const bool pays = most > 0 && gain > 1.0;
  allotment_.tokens_per_second = std::max(gain, 1.0) / std::max(plain(), 1e-9);
  if (beside_passes_ <= 0.0 || plain_left_ > 0 || (pays && since_plain_ >= kDrafts.plain_after)) {
    if (plain_left_ == 0) plain_left_ = beside_passes_ > 0.0 ? 2 : 1;
    plain_round_ = true;
    return 0;
  }
  if (pays || most == 0) return most;
  const bool known = drafting.pool < 0 ? drafting.judged >= kDrafts.acquainted
                                       : pools_[size_t(drafting.pool)].verdicts >= kDrafts.acquainted;
  if (since_probe_++ < (known ? probe_after_ : 0)) return 0;
  probing_ = true;
  since_probe_ = 0;
  return 1;
}

// A round with as many drafts as seem best, by what passes take and how often drafts are right.
Policy::Rate Policy::expected(double acceptance) const {
  Rate best;
  double tokens = 1.0, alive = 1.0;
  for (int drafts = 1; drafts <= kMaxChunk; ++drafts) {
    tokens += alive *= acceptance;
    const Rate other{1, tokens, times.early(1) + drafts * times.draw(1) + times.verify(drafts + 1)};
    if (other.value() > best.value()) best = other;
  }
  return best;
}

// The same in plain rounds instead of seconds, and what rounds with drafts really brought and took.
Policy::Rate Policy::drafting_rate(double acceptance) const {
  const Rate beforehand = expected(acceptance);
  return {0, kDrafts.expected * beforehand.tokens + drafting_.tokens,
          kDrafts.expected * beforehand.seconds / std::max(plain(), 1e-9) + drafting_.seconds};
}

// How many the account can pay if all are wrong: drawn by the exit head, or copied.
int Policy::affordable(double credit, int own, int sharing, bool drawn) const {
  const double plain = times.early(own) + times.verify(own), before = times.verify(own);
  const double step = drawn ? times.draw(sharing) / sharing : 0.0;
  int count = 0;
  while (count < kMaxChunk) {
    const double extra = times.margin * ((count + 1) * step + times.verify(own + count + 1) - before);
    if (extra > (drawn && count == 0 ? 2.0 : 1.0) * credit * plain) break;
    ++count;
  }
  return count;
}

void Policy::keep_schedule(Writer* writer, const RoundBudget& pass, int left) const {
  Schedule& schedule = writer->schedule = writer->drafting->asked;
  schedule.max_chunk = std::min(schedule.max_chunk, left);
  schedule = fitted(schedule, pass.idle && std::max(schedule.max_chunk, schedule.lookahead) <= left);
  if (schedule.max_chunk == 0) schedule.lookup = 0, schedule.recycle = false;
}

// Drafting goes on while the chance that all drafts so far and the next one are right is worth what the next one costs at the
// speed that is expected: the marginal rule of renewal rewards. Of a group of rows that the kernels take together, each has its
// share of what that costs.
void Policy::give(Writer* writer, int drafts, int copies, int own, int sharing) const {
  const Drafting& drafting = *writer->drafting;
  Schedule& schedule = writer->schedule = {};
  schedule.lookahead = schedule.first_chunk = drafts;
  schedule.max_chunk = drafts + copies;
  if (schedule.max_chunk > 0 && !(plain_round_ || probing_) && drafting.asked.copies() && (drafting.alone || copies > 0)) {
    schedule.lookup = drafting.asked.lookup;
    schedule.recycle = drafting.asked.recycle;
  }
  const auto worth = [&](double seconds) {
    return std::clamp(times.margin * seconds * allotment_.tokens_per_second, kDrafts.least_chance, kDrafts.sure_chance);
  };
  const double again = std::max(acceptance(drafting), 0.05), step = times.draw(sharing) / sharing;
  StopRule& rule = schedule.stop_rule;
  rule.kind = StopRule::Kind::kSurvival;
  for (int place = 0; place < schedule.max_chunk; ++place) {
    const double before = times.verify(own + place);
    double row = times.verify(own + place + 1) - before;
    for (int more = 2; place + more <= kMaxChunk; ++more) row = std::min(row, (times.verify(own + place + more) - before) / more);
    rule.thresholds.push_back(worth((step + row) / again));
    rule.copy_thresholds.push_back(worth(kDrafts.copies * row));
  }
}

// -- learning ----------------------------------------------------------------------------------------------------------

void Policy::learn(Drafting* drafting, const Round& round, bool in_flight, Clock::time_point now) {
  bool right = false;
  for (int i = 0; i < int(round.judged.size()); ++i) {
    if (round.judged[i].copied > 0) continue;
    const double good = i < round.accepted ? 1.0 : 0.0;
    right = right || good > 0.0;
    drafting->accepted = kDrafts.fades * drafting->accepted + good;
    drafting->judged = kDrafts.fades * drafting->judged + 1.0;
    if (drafting->pool < 0) continue;
    Pool& pool = pools_[size_t(drafting->pool)];
    pool.accepted = kDrafts.pool_fades * pool.accepted + good;
    pool.judged = kDrafts.pool_fades * pool.judged + 1.0;
    ++pool.verdicts;
  }
  if (!drafting->automatic) return;
  const Clock::time_point since = std::exchange(drafting->since, drafting->alone ? now : Clock::time_point());
  const bool overlapped = drafting->overlaps || drafting->left_over, follows = drafting->alone && since != Clock::time_point();
  const double wall = follows ? std::chrono::duration<double>(now - since).count() : 0.0;
  // What lies between passes is part of a round, unless it is so long that the round waited for something else.
  const bool its_own = follows && wall > round_seconds_ && wall < kDrafts.disturbed * std::max(beside_passes_, 1.0) * round_seconds_;
  const double passes = overlapped || its_own ? wall : round_seconds_;
  charge(drafting, round, overlapped, passes);
  if (!drafting->alone) return;
  if (follows) {
    Rate& measured = measured_[overlapped ? 2 : int(round.rows > 1 || !round.judged.empty())];
    ++measured.rounds, measured.tokens += double(round.committed.size()), measured.seconds += wall;
  }
  if (probing_) {   // a draft that was right is worth another one soon
    const double extra = times.draw(1) + times.verify(2) - times.verify(1);
    const int first = int(std::clamp(extra / times.plain() / kDrafts.probing, 4.0, 1000.0));
    probe_after_ = right ? first : std::max(first, std::min(2 * probe_after_, kDrafts.last_probe));
  }
  if (follows && stages_ != Stages::kNone && !drafting->left_over) choose_arm(drafting, int(round.committed.size()), wall);
  drafting->left_over = overlapped && !drafting->overlaps && in_flight;
}

// Overlapping or taking turns: whichever has been faster, each beside the other. Overlapping is tried in a few rounds, and kept
// as long as the last time and twice more where it was faster; where it was not, it is tried again ever more rarely. (Thompson
// sampling, of which EESD has one for its stop rule, would go back and forth for ever: here a change itself costs.)
void Policy::choose_arm(Drafting* drafting, int tokens, double seconds) {
  const bool overlaps = drafting->overlaps;
  Rate &now = rates_[overlaps], &other = rates_[!overlaps];
  if (++now.rounds > 2) now.tokens += tokens, now.seconds += seconds;   // the first ones find neither threads nor caches at hand
  bool change = false;
  if (!overlaps) {
    change = drafting_round_ && now.rounds >= wait_ && drafting->credit > 0.5;
  } else if (drafting->credit <= 0.0 || (now.rounds >= kDrafts.trial && now.value() < kDrafts.worth_changing * other.value())) {
    change = true;
    wait_ *= kDrafts.more_rarely;
  } else if (now.rounds >= stay_) {   // are turns slower still?
    change = true;
    stay_ *= kDrafts.more_rarely;
    wait_ = std::min(wait_, 32);
  }
  if (!change) return;
  other = {};
  drafting->overlaps = !overlaps;
}

// Tokens earn one plain token each. Of an answer alone a round costs what its passes took beside the last plain ones; among
// others a draft costs what it was expected to.
void Policy::charge(Drafting* drafting, const Round& round, bool overlapped, double seconds) {
  const int tokens = int(round.committed.size()), ahead = std::clamp(kDrafts.ahead - drafting->tokens, 0, tokens);
  const int drafts = int(round.judged.size()) + round.dropped, drawn = drafts - round.copied;
  drafting->tokens += tokens;
  double lost = drawn * drafting->draft_price + round.copied * drafting->row_price;
  if (drafting->alone && drafts == 0 && round.rows == 1 && !overlapped) {
    if (plain_left_ != 2) {   // the first one finds in the caches what other rounds have left
      const double its = seconds / times.plain(), known = beside_passes_;
      beside_passes_ += known > 0.0 ? 0.3 * (std::clamp(its, known / kDrafts.disturbed, known * kDrafts.disturbed) - known) : its;
      since_plain_ = 0;
    }
    plain_left_ = std::max(plain_left_ - 1, 0);
    for (double* sum : {&drafting_.tokens, &drafting_.seconds}) *sum *= 0.99;
  } else if (drafting->alone && beside_passes_ > 0.0) {
    // A plain round that was held up makes those with drafts look fast: these are charged half of what they should cost at least.
    const double its = overlapped ? seconds / plain() : std::max(seconds / plain(), 1.0 + 0.5 * lost);
    if (drafting_round_) {
      for (double* sum : {&drafting_.tokens, &drafting_.seconds}) *sum *= kDrafts.recent;
      drafting_.tokens += tokens, drafting_.seconds += its;
    }
    lost = its - 1.0;
    ++since_plain_;
  }
  drafting->credit += tokens - 1 - lost + kDrafts.loss_share * (tokens - ahead);
  drafting->credit = std::min(drafting->credit, kDrafts.most_credit);
  if (drafting->alone) carried_ = drafting->credit;
}

// -- from one process to the next --------------------------------------------------------------------------------------

std::vector<double> Policy::learned() const {
  std::vector<double> numbers{double(wait_), double(stay_)};
  for (const Pool& pool : pools_) numbers.insert(numbers.end(), {pool.accepted, pool.judged, double(pool.verdicts)});
  for (const PassTime* time : {&times.early, &times.draft, &times.late, &times.choose}) {
    const std::vector<double> more = time->learned();
    numbers.insert(numbers.end(), more.begin(), more.end());
  }
  return numbers;
}

std::string Policy::explain() const {
  if (!times.late.known()) return {};
  char line[160];
  std::string out;
  const auto add = [&](const char* form, auto... values) {
    std::snprintf(line, sizeof line, form, values...);
    (out += out.empty() ? "" : "\n") += line;
  };
  const double passes = times.plain(), took = beside_passes_ > 0.0 ? plain() : passes;
  add("a plain token takes %.2f ms (%.2f of passes), a draft step %.2f ms", 1e3 * took, 1e3 * passes, 1e3 * times.draw(1));
  add("a pass over 1/2/4/8/16 rows takes %.2f/%.2f/%.2f/%.2f/%.2f ms", 1e3 * times.verify(1), 1e3 * times.verify(2), 1e3 * times.verify(4),
      1e3 * times.verify(8), 1e3 * times.verify(16));
  for (int pool : {0, 1})
    if (const Pool& each = pools_[size_t(pool)]; each.verdicts > 0)
      add("%s: %.2f of the last drafts were right, of %d", pool ? "sampled" : "greedy", each.accepted / each.judged, each.verdicts);
  const double a = pools_[0].accepted / pools_[0].judged, gain = drafting_rate(a).value(), speed = std::max(gain, 1.0) / took;
  add("alone, tokens/s: plain %.0f; with drafts %.0f by what passes take, %.0f by what rounds brought", 1.0 / took, expected(a).value(),
      gain / took);
  add("one draft more has to promise %.2f tokens, a copy %.2f", speed * (times.draw(1) + times.verify(2) - times.verify(1)),
      speed * kDrafts.copies * (times.verify(5) - times.verify(1)) / 4);
  const char* const kinds[] = {"plain", "with drafts", "overlapped"};
  for (size_t i = 0; i < 3; ++i)
    if (const Rate& each = measured_[i]; each.rounds > 0)
      add("%d rounds %s: %.2f ms and %.2f tokens each, %.0f tokens/s", each.rounds, kinds[i], 1e3 * each.seconds / each.rounds,
          each.tokens / each.rounds, each.value());
  if (rates_[1].rounds > 0) add("in turns %.0f tokens/s, overlapped %.0f", rates_[0].value(), rates_[1].value());
  return out;
}

// It says what to begin with; a few rounds count for more.
void Policy::know(const std::vector<double>& numbers) {
  const size_t each = PassTime::kNumbers, rest = 8;
  if (numbers.size() != rest + 4 * each) return;
  for (double number : numbers)
    if (!(number >= 0.0 && number < 1e9)) return;
  wait_ = int(std::max(numbers[0], 1.0)), stay_ = int(std::max(numbers[1], 1.0));
  for (size_t i = 0; i < 2; ++i) {
    const double weight = std::min(numbers[3 + 3 * i], 8 * kDrafts.prior_weight);
    pools_[i] = {numbers[2 + 3 * i] / std::max(numbers[3 + 3 * i], 1.0) * weight, weight, int(std::min(numbers[4 + 3 * i], 1e6))};
    if (!(pools_[i].accepted < weight)) pools_[i] = {0.5 * kDrafts.prior_weight, kDrafts.prior_weight, 0};
  }
  size_t at = rest;
  for (PassTime* time : {&times.early, &times.draft, &times.late, &times.choose}) time->know(&numbers[std::exchange(at, at + each)]);
}

// -- alone, by whole rounds --------------------------------------------------------------------------------------------

// Of a pass's weights, those that a draft reads: until one has been measured.
constexpr double kDraftShare = 0.3;

AlonePolicy::AlonePolicy(double prior, bool overlaps)
    : policy_(true, kDraftShare, prior, overlaps ? Policy::Stages::kThreads : Policy::Stages::kNone) {}

void AlonePolicy::begin(const Schedule& asked, int pool) {
  drafting_ = {};
  drafting_.automatic = true;
  drafting_.asked = asked;
  drafting_.pool = pool;
  plan();
}

// The rows of the round are its pass; what that does not explain, its draft steps took.
const Schedule& AlonePolicy::after(const Round& round, double seconds) {
  const int drawn = std::max(int(round.judged.size()) + round.dropped - round.copied, 0);
  if (!schedule_.overlap) {
    const double pass = drawn > 0 && policy_.times.late.known() ? std::min(policy_.times.late(round.rows), seconds) : seconds;
    policy_.took(&PassTimes::late, round.rows, pass);
    if (drawn > 0) policy_.took_steps(drawn, std::max(seconds - pass, 1e-9));
  }
  now_ += std::chrono::nanoseconds(int64_t(1e9 * seconds));
  policy_.learn(&drafting_, round, false, now_);
  plan();
  return schedule_;
}

void AlonePolicy::plan() {
  std::vector<Policy::Writer> writers{{&drafting_, {}}};
  policy_.plan(&writers, {0, 0, kMaxChunk, true, drafting_.overlaps});
  schedule_ = writers.front().schedule;
}

// -- an allotment ------------------------------------------------------------------------------------------------------

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

