// One answer of the loop: its text, its blocks, its samplers, and what is on its way to whoever asked for it.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "exit_rows.h"
#include "loop.h"
#include "../stages/ranks.h"

namespace ppsd {

struct Loop::Answer {
  Answer(Loop* loop, Request wanted, bool chosen, int told)
      : request(std::move(wanted)),
        grammar(told),
        verdict_track(loop->ranks_ ? kDraftTrack : kVerifyTrack),
        prompt_rows(int(request.prompt.size()) - request.limits.own - 1),
        rotated_as(loop->model().rotary.matters(prompt_rows + 1)),
        out(std::make_shared<AnswerEvents>(loop->condition_, int(request.prompt.size()))),
        scheduler(fitted(request.schedule, false), request.limits, request.sampling.seed),
        table(&loop->blocks_, rotated_as, request.kept),
        exits(size_t(loop->model().shape.hidden_size)),
        vocabulary(loop->passes_.draft_vocabulary()),
        drafting(*loop->model().kernels, loop->model().shape.vocab_size, loop->passes_.members()),
        verifying(std::make_shared<Sampler>(*loop->model().kernels, loop->model().shape.vocab_size, loop->passes_.members())) {
    Sampling sampling = request.sampling;
    sampling.answer = prompt_rows + 1;
    sampling.stop_ids = request.limits.stop_ids;
    verifying->begin(sampling, 0);
    if (loop->ranks_ || loop->limits_.cuts) settings = words_of({request.limits.end, sampling.answer, grammar, sampling});
    sampling.logprobs = -1;   // of drafts nobody asks
    sampling.mask = sampling.draft_mask;
    drafting.begin(sampling, 0);
    scheduler.remember(request.ngrams);
    drafts.automatic = chosen;
    drafts.asked = request.schedule;
    drafts.pool = !request.oracle.truth.empty() ? -1 : int(request.sampling.temperature > 0.0);
  }

  // The sampler learns the text's rows from `start` on, and before these what it has not seen: rows of another answer.
  void feed_sampler(Sampler& sampler, int start, const int* ids, int count) const {
    const int known = sampler.known();
    if (known < start) sampler.know(known, text().data() + known, start - known);
    sampler.know(start, ids, count);
  }

  // Rows before this one are in the table, and have passed all layers.
  void go_on_from(int row) {
    rows = left = headed = row;
    exits.restart(row);
  }
  void put(Event event) {
    mark(request.trace.get(), verdict_track, event);
    out->put(std::move(event));
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

  const Request request;
  const int grammar, verdict_track;
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
  const float* taps = nullptr;   // of the part that is being concluded, [rows][hidden], for a head with a tap

  // Where stages have passes of their own:
  size_t words() const {           // of the tables of a pass, at the most
    return settings.size() + text().size() - size_t(std::min(told, rows)) + text().size() / kSpan + 4 * kPassRows;
  }
  std::vector<int32_t> settings;   // what they are told first
  int number = 0;                  // 0: they have not heard of it
  int told = 0;                    // tokens that the last rank's sampler knows
  int flying = 0;                  // passes that are under way with rows of it
};

// Rows of an answer in a pass, at positions [start, start + rows).
struct Loop::Part {
  Answer* answer;         // null: under way for an answer that is over
  int start, rows;
  bool prompt;
  std::vector<int> ids;   // of the rows, where other ranks are to hear of them
  uint64_t epoch = 0;     // of the answer, when it was launched
  int chosen = 0;         // chooses(), then

  Segment segment() const { return answer->segment(start, rows); }
  int chooses() const {   // how many of its rows choose a token, the last ones
    const bool first = prompt && !answer->begun && start + rows == answer->rows_wanted();
    return first ? 1 : prompt ? 0 : rows;
  }
};

// A pass on its way over the stages.
struct Loop::Flight {
  uint64_t number;
  std::vector<Part> parts;
  bool alone;   // no other one had rows of these answers when it left
  std::chrono::steady_clock::time_point begun;
};

}  // namespace ppsd
