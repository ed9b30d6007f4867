#include "remote.h"

#include <algorithm>
#include <utility>

#include "station.h"

namespace ppsd {

Remote::Remote(DraftStage* draft, int hidden, int prompt_rows, const Schedule& schedule, const Limits& limits,
               uint64_t seed, uint64_t first_epoch, bool report_drafts, bool feedback, std::shared_ptr<Planner> planner,
               bool trace)
    : draft_(draft),
      hidden_(hidden),
      prompt_rows_(prompt_rows),
      scheduler_(schedule, limits, seed),
      first_epoch_(first_epoch),
      report_drafts_(report_drafts),
      feedback_(feedback),
      replanning_(std::move(planner)),
      trace_(trace ? std::make_unique<Trace>(Clock::time_point()) : nullptr) {}

void Remote::begin(const std::vector<int>& prompt, int keep, const std::vector<int32_t>& settings, bool logprobs) {
  prompt_ = prompt;
  keep_ = keep;
  settings_ = settings;
  settings_.resize(std::max(settings_.size(), size_t(kWireSettings)));
  if (settings_.size() > most_words(hidden_) - kWireIds)
    throw std::runtime_error("logit_bias and stop ids are too many to send to the other ranks: give fewer");
  logprobs_ = logprobs;
  began_ = Clock::now();
}

// -- the drafting thread -----------------------------------------------------------------------------------------------

int Remote::work(int32_t* out) {
  if (!prompt_sent_) return send_prompt(out);
  for (;;) {
    DraftStep step;
    Chunk chunk;
    int limit = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return over() || (begun_ && (scheduler_.ready() || scheduler_.may_step())); });
      if (over()) return -1;
      if (scheduler_.ready()) {
        chunk = scheduler_.launch();
        const bool committed = chunk.start == int(scheduler_.tokens().size()) - 1;
        limit = std::max(1, scheduler_.schedule().max_chunk + int(committed));
      } else {
        step = scheduler_.next_step();
        if (report_drafts_)
          for (const Drafted& copy : copied_for(step)) report_locked(copy);
      }
    }
    if (chunk.rows() > 0) {
      draft_->export_hidden(&chunk);
      chunk.epoch += first_epoch_;
      return send(chunk, limit, 0, out);
    }
    Draft draft;
    const auto cancelled = [&] { return scheduler_.epoch() != step.epoch || stop_.load(std::memory_order_relaxed); };
    const Clock::time_point begun = Clock::now();
    TraceScope scope(trace_.get(), kDraftTrack, "draft", int(step.ids.size()));
    const bool done = draft_->step(step, step.draw ? &draft : nullptr, cancelled);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done || !scheduler_.stepped(step, step.draw ? &draft : nullptr)) {
      scope.rename("dropped draft");
      continue;
    }
    if (step.draw && step.ids.size() == 1) {
      ++counts_.steps;
      counts_.seconds += std::chrono::duration<double>(Clock::now() - begun).count();
    }
    if (step.draw && report_drafts_) report_locked(Drafted{step.start + int(step.ids.size()), draft.token});
  }
}

// A block of the prompt at a time, so that the next stages work on it while the next one is made.
int Remote::send_prompt(int32_t* out) {
  int written = 0;
  if (sent_ < 0) {
    sent_ = keep_;
    WireHeader header;
    header.kind = int32_t(Wire::kBegin);
    header.epoch = first_epoch_;
    header.start = keep_;
    header.flags = (feedback_ ? kWireFeedback : 0) | (trace_ ? kWireTrace : 0) | (logprobs_ ? kWireLogprob : 0);
    header.more = int32_t(settings_.size()) - kWireSettings;
    header.limit = settings_.front();
    header.sent = wire_clock();
    write_header(header, out);
    std::copy(settings_.begin(), settings_.end(), out + kWireIds);
    written = 1;
  }
  DraftStep step;
  step.start = sent_;
  const int rows = std::min(prompt_rows_, int(prompt_.size()) - sent_);
  step.ids.assign(prompt_.begin() + sent_, prompt_.begin() + sent_ + rows);
  TraceScope scope(trace_.get(), kDraftTrack, "prompt", rows);
  if (!draft_->step(step, nullptr, [this] { return stop_.load(std::memory_order_relaxed); })) return -1;
  sent_ += rows;
  Chunk chunk;
  chunk.epoch = first_epoch_;
  chunk.start = step.start;
  chunk.ids = std::move(step.ids);
  draft_->export_hidden(&chunk);
  const bool end = sent_ == int(prompt_.size());
  written += send(chunk, prompt_rows_, kWirePrompt | (end ? kWirePromptEnd : 0), out + most_words(hidden_) * written);
  if (end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (over()) return -1;
    prompt_sent_ = true;
  }
  return written;
}

int Remote::send(const Chunk& chunk, int limit, int32_t flags, int32_t* out) const {
  int written = 0;
  for (int done = 0; done < chunk.all_rows(); done += kMaxRows, ++written) {
    const bool more = done + kMaxRows < chunk.all_rows();
    int32_t* message = out + most_words(hidden_) * written;
    write_rows(chunk, done, hidden_, limit, more ? flags & ~kWirePromptEnd : flags, message);
  }
  return written;
}

// -- the receiving thread ----------------------------------------------------------------------------------------------

bool Remote::land(const int32_t* message, size_t words) {
  const WireHeader header = read_header(message, words, hidden_);
  if (header.kind != int32_t(Wire::kVerdict)) throw std::runtime_error("a message that is no verdict came back");
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t before = epoch();
  const bool spared = begun_ && header.epoch + 1 == before && header.start == scheduler_.spared() && header.siblings & 1;
  if ((header.epoch < epoch() && !spared) || over()) return false;
  const int expected = begun_ ? int(scheduler_.tokens().size()) - 1 : int(prompt_.size()) - 1;
  const bool fits = (spared || header.epoch == epoch()) && header.start == expected && bool(header.flags & kWirePrompt) == !begun_;
  if (!fits || (begun_ ? !scheduler_.in_flight() : !prompt_sent_))
    throw std::runtime_error("a verdict on row " + std::to_string(header.start) + " came back, where row " +
                             std::to_string(expected) + " is next");
  const float* rows = reinterpret_cast<const float*>(message + kWireRows);
  const size_t carried = header.flags & kWireFeedback ? size_t(header.count) * hidden_ : 0;
  std::vector<float> hidden(rows, rows + carried);
  std::vector<Logprobs> logprobs;
  if (header.flags & kWireLogprob) logprobs = read_logprobs(message + kWireRows + carried, header.count);
  std::optional<Round> round;
  if (!begun_) {
    round = scheduler_.begin(prompt_, keep_, message[kWireIds], std::move(hidden), std::move(logprobs));
    begun_ = true;
  } else {
    std::vector<int> true_ids(message + kWireIds, message + kWireIds + header.count);
    std::vector<Sibling> siblings = siblings_of(header);
    for (Sibling& sibling : siblings) sibling.id = scheduler_.sibling_at(sibling.position);   // or -1: it was not needed
    round = scheduler_.land({header.epoch - first_epoch_, header.start, std::move(true_ids), std::move(hidden),
                             std::move(siblings), std::move(logprobs)});
  }
  if (round) {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - std::exchange(committed_, now)).count();
    replanning_.after(*round, seconds, &scheduler_);
    report_locked(*std::move(round));
    if (scheduler_.finished()) events_.finish();
  }
  const bool rolled_back = epoch() != before;
  wake_.notify_one();
  return rolled_back || scheduler_.finished();
}

// -- the consumer ------------------------------------------------------------------------------------------------------

void Remote::report_locked(Event event) {
  mark(trace_.get(), kDraftTrack, event);   // where verdicts land
  events_.put(std::move(event), std::chrono::duration<double>(Clock::now() - began_).count());
}

void Remote::cancel() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_.store(true);
  if (!scheduler_.finished()) scheduler_.cancel();
  wake_.notify_all();
  events_.finish();
}

Remote::Counts Remote::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace ppsd
