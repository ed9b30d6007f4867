// One answer of the loop, from the request on: its text, its blocks, its samplers, and what is on its way to whoever asked for it.
#pragma once

#include <algorithm>
#include <chrono>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "../core/scheduler.h"
#include "../core/trace.h"
#include "../stages/pass.h"
#include "answer_events.h"
#include "blocks.h"
#include "exit_rows.h"
#include "model_backend.h"
#include "policy.h"

namespace ppsd {

// What an answer is to be like.
struct Request {
  std::vector<int> prompt;
  Sampling sampling;
  Limits limits;
  Schedule schedule;
  OwnedNgrams ngrams;             // what is copied from
  bool report_drafts = false;
  bool kept = true;               // its rows may be saved: see Blocks
  Oracle oracle;
  std::shared_ptr<Trace> trace;   // or null
};

struct Sequence {
  // told_grammar: its number, see Loop::add. track: of its trace, where verdicts are marked.
  Sequence(Request wanted, bool automatic, int told_grammar, int track, ModelBackend* computed_by, Blocks* blocks, std::shared_ptr<Condition> condition)
      : backend(*computed_by),
        request(std::move(wanted)),
        verdict_track(track),
        prompt_rows(int(request.prompt.size()) - request.limits.own - 1),
        rotated_as(backend.model().rotary.matters(prompt_rows + 1)),
        out(std::make_shared<AnswerEvents>(std::move(condition), int(request.prompt.size()))),
        scheduler(fitted(request.schedule, false), request.limits, request.sampling.seed),
        table(blocks, rotated_as, request.kept),
        exits(size_t(backend.model().shape.hidden_size)),
        vocabulary(backend.draft_vocabulary()),
        drafting(*backend.model().kernels, backend.model().shape.vocab_size, backend.members()),
        verifying(std::make_shared<Sampler>(*backend.model().kernels, backend.model().shape.vocab_size, backend.members())) {
    Sampling sampling = request.sampling;
    sampling.answer = prompt_rows + 1;
    sampling.stop_ids = request.limits.stop_ids;
    verifying->begin(sampling);
    settings = {request.limits.end, told_grammar, sampling};
    sampling.logprobs = -1;   // of drafts nobody asks
    sampling.mask = sampling.draft_mask;
    drafting.begin(sampling);
    scheduler.remember(request.ngrams);
    drafts.automatic = automatic;
    drafts.asked = request.schedule;
    drafts.pool = !request.oracle.truth.empty() ? -1 : int(request.sampling.temperature > 0.0);
  }

  const std::vector<int>& text() const { return begun ? scheduler.tokens() : request.prompt; }
  Segment segment(int start, int count) const {   // rows of the text
    return {count, start, table.pointers(), table.size(), std::clamp(prompt_rows - start, 0, count)};
  }
  // Rows of the text that must be there before it can go on: all but that of the newest token. A prompt's last row says what
  // the first token is.
  int rows_wanted() const { return int(text().size()) - int(begun); }
  bool writing() const { return begun && rows == rows_wanted(); }
  // Would it draft while it is verified, if it had the stages to itself?
  bool overlaps() const {
    return writing() && (drafts.automatic ? drafts.overlaps : drafts.asked.overlap);
  }
  // Over ranks, may it have rows although some are under way? Those of its prompt, or drafts while others are verified.
  bool goes_on() const {
    if (!writing()) return left < rows_wanted();
    return scheduler.schedule().overlap && (scheduler.ready() || scheduler.may_step());
  }
  // Of the first `most` rows of its text, those that texts share.
  int shareable(int most) const { return backend.decoded_rows_differ() ? std::min(most, prompt_rows) : most; }

  // Rows before this one are in the table, and have passed all layers.
  void go_on_from(int row) {
    rows = left = headed = row;
    exits.restart(row);
  }
  void set_schedule(const Schedule& schedule) {   // of the round; and how many drafts there may be
    scheduler.set_schedule(schedule);
    const int to_end = request.limits.end - int(text().size());
    most = std::max(std::min(std::max(schedule.max_chunk, schedule.lookahead), to_end), 0);
  }
  // Its next draft step in hand, if there is one; true: it draws. Steps that draw nothing stay, for the pass that verifies.
  bool next_step() {
    if (over || !scheduler.may_step()) return false;
    step = scheduler.next_step();
    if (request.report_drafts)
      for (const Drafted& copy : copied_for(step)) put(copy);
    return step.draw;
  }
  // The sampler learns the text's rows from `start` on, and before these what it has not seen: rows of another answer.
  void feed_sampler(Sampler& sampler, int start, const int* ids, int count) const {
    const int known = sampler.known();
    if (known < start) sampler.know(known, text().data() + known, start - known);
    sampler.know(start, ids, count);
  }
  // [count][hidden] after the last layer, and behind each, for a head with a tap, what the part's rows from `row` on are there.
  std::vector<float> with_taps(const float* hidden, int row, int count) const {
    const size_t width = size_t(backend.model().shape.hidden_size), behind = backend.tap_width();
    std::vector<float> all;
    for (const float* tapped = taps + size_t(row) * behind; count > 0; --count, hidden += width, tapped += behind) {
      all.insert(all.end(), hidden, hidden + width);
      if (behind > 0) all.insert(all.end(), tapped, tapped + behind);
    }
    return all;
  }
  void cut(int end) {   // what is known of rows from `end` on is void
    exits.cut(end);
    headed = backend.lags() ? std::min(headed, end) : rows;
  }
  void prefill_head() {   // all its rows through the exit head's own layers
    if (headed == rows) return;
    backend.prefill_head(segment(headed, rows - headed), exits.at(headed));
    headed = rows;
  }
  void read_taps() { backend.read_taps(&eagle, table.pointers(), table.size()); }
  void read_taps_from(int row) {   // of the whole text, whose tokens from this row on an EAGLE-3 head has not heard
    eagle.know(row, text().data() + row, int(text().size()) - row);
    read_taps();
  }
  void put(Event event) {
    mark(request.trace.get(), verdict_track, event);
    out->put(std::move(event));
  }
  void fail(std::exception_ptr why) {
    over = true;
    failure = std::move(why);
  }

  ModelBackend& backend;
  const Request request;
  const int verdict_track;
  const int prompt_rows;      // of the text: of the prompt, all but the last, which is the first that a token is chosen after
  const int rotated_as;       // see Rotary::matters
  const std::shared_ptr<AnswerEvents> out;
  Scheduler scheduler;
  BlockTable table;
  ExitRows exits;
  EagleText eagle;            // what an EAGLE-3 head knows of it
  DraftVocabulary vocabulary;
  Sampler drafting;
  const std::shared_ptr<Sampler> verifying;   // which stages on threads of their own use too
  Drafting drafts;
  uint64_t arrival = 0;
  bool begun = false;         // the scheduler has the prompt and a token
  bool over = false, running = false;
  std::exception_ptr failure; // why it is over
  int rows = 0, shared = 0;   // verified, in the table; and of these, at first, another text's
  int left = 0;               // of a text that is read, rows that are there or under way
  int headed = 0;             // rows that have passed the exit head's own layers
  int most = 0;               // drafts that the round at hand may have
  DraftStep step;             // in hand
  const float* taps = nullptr;   // of the part that is being concluded, [rows][taps][hidden], for a head with taps

  // Where stages have passes of their own:
  size_t words() const {           // of the tables of a pass, at the most
    const Sampling& sampling = settings.sampling;
    return 2 * sampling.logit_bias.size() + sampling.stop_ids.size() + text().size() - size_t(std::min(told, rows)) + text().size() / kSpan + 4 * kPassRows;
  }
  Settings settings;               // what they are told first
  int number = 0;                  // 0: they have not heard of it
  int told = 0;                    // tokens that the last rank's sampler knows
  int flying = 0;                  // passes that are under way with rows of it
};

using Sequences = std::list<std::unique_ptr<Sequence>>;

// Rows of an answer in a pass, at positions [start, start + rows).
struct Part {
  Sequence* answer;       // null: under way for an answer that is over
  int start, rows;
  bool prompt;
  std::vector<int> ids;   // of the rows, but of a prompt's
  uint64_t epoch = 0;     // of the answer, when it was launched
  int chosen = 0;         // chooses(), then

  Segment segment() const { return answer->segment(start, rows); }
  int chooses() const {   // how many of its rows choose a token, the last ones
    const bool first = prompt && !answer->begun && start + rows == answer->rows_wanted();
    return first ? 1 : prompt ? 0 : rows;
  }
  const int* tokens() const { return prompt ? answer->text().data() + start : ids.data(); }
  // In the answer's timeline, if it has one: from `begun` to now.
  void span(const char* name, int track, Trace::Clock::time_point begun) const {
    if (Trace* trace = answer->request.trace.get()) trace->add(name, track, rows, begun, Trace::Clock::now());
  }
};

}  // namespace ppsd
