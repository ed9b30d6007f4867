#include "station.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace ppsd {
namespace {

// Rows that adopt a sibling may come while its own are still under way.
int spared_by(const WireHeader& header) { return header.adopted > 0 ? header.start - 1 : -1; }

Station::Clock::time_point time_of(int64_t sent) { return Station::Clock::time_point(std::chrono::nanoseconds(sent)); }

}  // namespace

int64_t wire_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Station::Clock::now().time_since_epoch()).count();
}

void sleep_until(int64_t clock) {
  std::this_thread::sleep_until(Station::Clock::time_point(std::chrono::nanoseconds(clock)));
}

void write_rows(const Chunk& chunk, int done, int hidden, int limit, int32_t flags, int32_t* message) {
  const int count = std::min(kMaxRows, chunk.all_rows() - done);
  if (count < 1 || (!chunk.siblings.empty() && chunk.all_rows() > kMaxRows))
    throw std::logic_error("a pass of " + std::to_string(chunk.all_rows()) + " rows does not fit into messages");
  WireHeader header;
  header.kind = int32_t(Wire::kRows);
  header.epoch = chunk.epoch;
  header.start = chunk.start + done;
  header.count = count;
  header.limit = limit;
  header.flags = flags;
  header.sent = wire_clock();
  header.siblings = bits_of(chunk.siblings, chunk.start);
  if (chunk.adopted && done == 0) header.adopted = chunk.adopted->id + 1;
  write_header(header, message);
  int32_t* id = std::copy_n(chunk.ids.begin() + done, std::min(count, chunk.rows() - done), message + kWireIds);
  for (const Sibling& sibling : chunk.siblings) *id++ = sibling.id;
  std::memcpy(message + kWireRows, chunk.hidden.data() + size_t(done) * hidden, size_t(count) * hidden * 4);
}

Station::Station(VerifyStage* stage, int hidden, bool last, int prompt_rows, Begin begin, double delay)
    : stage_(stage),
      hidden_(hidden),
      last_(last),
      prompt_rows_(prompt_rows),
      begin_(std::move(begin)),
      delay_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(delay))) {}

// -- what comes in -----------------------------------------------------------------------------------------------------

void Station::post(const int32_t* words, size_t count) {
  const WireHeader header = read_header(words, count, hidden_);
  if (header.kind == int32_t(Wire::kVerdict)) throw std::runtime_error("a verdict came to a verification stage");
  const std::lock_guard<std::mutex> lock(mutex_);
  Message message;
  if (!pool_.empty()) {
    message = std::move(pool_.back());
    pool_.pop_back();
  }
  const bool rows = header.kind == int32_t(Wire::kRows);
  message.header = header;
  message.due = delay_.count() > 0 ? time_of(header.sent) + delay_ : Clock::time_point();
  message.ids.assign(words + kWireIds, words + kWireIds + (rows ? header.count : kWireSettings + header.more));
  const float* hidden = reinterpret_cast<const float*>(words + kWireRows);
  message.hidden.assign(hidden, hidden + size_t(header.count) * hidden_);
  // Rows of a new epoch may overtake its announcement.
  if (delay_.count() == 0 && rows) epoch_.raise(header.epoch, spared_by(header));
  inbox_.push_back(std::move(message));
  changed_.notify_one();
}

void Station::announce(uint64_t epoch, int64_t sent, int spared) {
  if (delay_.count() > 0) std::this_thread::sleep_until(time_of(sent) + delay_);
  const std::lock_guard<std::mutex> lock(mutex_);
  epoch_.raise(epoch, spared);
  drop_void_locked();
}

void Station::close() {
  closed_.store(true);
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void Station::drop_void_locked() {
  const auto is_void = [this](const Message& message) {
    return message.header.kind == int32_t(Wire::kRows) && epoch_.is_void(message.header.epoch, message.header.start);
  };
  while (!inbox_.empty() && is_void(inbox_.front())) {
    recycle_locked(std::move(inbox_.front()));
    inbox_.pop_front();
  }
}

void Station::recycle_locked(Message message) {
  if (pool_.size() < 64) pool_.push_back(std::move(message));
}

// -- the work ----------------------------------------------------------------------------------------------------------

// The next piece of work: the beginning of an answer, or rows that make one pass. False: `wake` says when to look again.
bool Station::take_locked(std::vector<Message>* taken, Clock::time_point* wake) {
  drop_void_locked();
  if (inbox_.empty()) return false;
  const Clock::time_point now = delay_.count() > 0 ? Clock::now() : Clock::time_point();
  if (inbox_.front().due > now) {
    *wake = std::min(*wake, inbox_.front().due);
    return false;
  }
  const WireHeader first = inbox_.front().header;
  // The buffers of this stage and of the messages after it have their size, whatever the limit says.
  const int most = std::min(first.limit, first.flags & kWirePrompt ? prompt_rows_ : kMaxRows);
  int rows = 0, all_rows = 0;
  while (!inbox_.empty() && inbox_.front().due <= now) {
    const WireHeader& next = inbox_.front().header;
    const bool merges = next.kind == int32_t(Wire::kRows) && next.epoch == first.epoch && next.start == first.start + rows &&
                        next.epoch >= epoch_.now() && next.adopted == 0 &&
                        !((next.flags | first.flags) & kWireWhole) &&
                        (next.flags & kWirePrompt) == (first.flags & kWirePrompt) && rows + next.text_rows() <= most &&
                        (next.flags & kWirePrompt || all_rows + next.count <= kMaxRows);
    if (rows > 0 && !merges) break;
    rows += next.text_rows(), all_rows += next.count;
    taken->push_back(std::move(inbox_.front()));
    inbox_.pop_front();
    if (first.kind != int32_t(Wire::kRows)) break;
  }
  return true;
}

int Station::work(int32_t* out, int milliseconds) {
  std::vector<Message> taken;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(milliseconds);
    while (!closed_.load()) {
      Clock::time_point wake = end;
      if (take_locked(&taken, &wake)) break;
      if (Clock::now() >= end) return 0;
      changed_.wait_until(lock, wake);
    }
    if (closed_.load()) return -1;
  }
  struct Busy {   // also while an exception, as of a grammar that gives up, passes by
    explicit Busy(std::atomic<int64_t>* since) : since_(since) { since_->store(wire_clock()); }
    ~Busy() { since_->store(0); }
    std::atomic<int64_t>* since_;
  } busy(&busy_since_);
  return taken.front().header.kind == int32_t(Wire::kBegin) ? begin(taken.front(), out) : pass(std::move(taken), out);
}

int Station::begin(const Message& message, int32_t* out) {
  const int keep = message.header.start, end = message.header.limit;
  if (keep > held_ || end < keep)
    throw std::runtime_error("an answer wants to keep " + std::to_string(keep) + " rows; this stage holds " + std::to_string(held_));
  held_ = keep;
  end_ = end;
  asked_ = message.header.flags & (kWireFeedback | kWireLogprob);
  begin_(keep, end, message.ids);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    trace_ = message.header.flags & kWireTrace ? std::make_shared<Trace>(Clock::time_point()) : nullptr;
    epoch_.raise(message.header.epoch);
  }
  if (last_) return 0;
  if (message.ids.size() > most_words(hidden_) - kWireIds) throw std::runtime_error("an answer has too many settings");
  WireHeader header = message.header;
  header.sent = wire_clock();
  write_header(header, out);
  std::copy(message.ids.begin(), message.ids.end(), out + kWireIds);
  return 1;
}

int Station::pass(std::vector<Message> taken, int32_t* out) {
  const WireHeader first = taken.front().header;
  Chunk chunk;
  chunk.epoch = first.epoch;
  chunk.start = first.start;
  if (first.adopted > 0) chunk.adopted = Sibling{first.start - 1, first.adopted - 1};
  const auto take = [&](const Message& message, int begin, int end) {
    const auto row = message.hidden.begin();
    chunk.hidden.insert(chunk.hidden.end(), row + ptrdiff_t(begin) * hidden_, row + ptrdiff_t(end) * hidden_);
  };
  for (const Message& message : taken) {   // rows of the text, and after them those of siblings
    const int rows = message.header.text_rows();
    chunk.ids.insert(chunk.ids.end(), message.ids.begin(), message.ids.begin() + rows);
    take(message, 0, rows);
  }
  for (const Message& message : taken) {
    std::vector<Sibling> siblings = siblings_of(message.header, message.ids.data());
    chunk.siblings.insert(chunk.siblings.end(), siblings.begin(), siblings.end());
    take(message, message.header.text_rows(), message.header.count);
  }
  const int32_t flags = taken.back().header.flags;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    epoch_.raise(first.epoch, spared_by(first));
    for (Message& message : taken) recycle_locked(std::move(message));
  }
  if (chunk.start > held_)
    throw std::runtime_error("a message begins at row " + std::to_string(chunk.start) + "; this stage holds " + std::to_string(held_));
  if (chunk.start + chunk.rows() > end_)
    throw std::runtime_error("a message goes on to row " + std::to_string(chunk.start + chunk.rows()) +
                             "; the answer ends before row " + std::to_string(end_));
  held_ = chunk.start;
  const auto cancelled = [this, epoch = chunk.epoch, start = chunk.start] {
    return epoch_.is_void(epoch, start) || closed_.load(std::memory_order_relaxed);
  };
  const Clock::time_point begun = Clock::now();
  TraceScope scope(trace_.get(), kVerifyTrack, flags & kWirePrompt ? "prompt" : "verify", chunk.all_rows());
  const bool done = !cancelled() && stage_->run(&chunk, cancelled) && !cancelled();
  int written = 0;
  if (done) {
    held_ = chunk.start + chunk.rows();
    if (!last_) {
      written = forward(chunk, flags, out);
    } else if (!(flags & kWirePrompt) || (flags & kWirePromptEnd)) {
      const int last = flags & kWirePrompt ? 1 : chunk.rows(), rows = last + int(chunk.siblings.size());
      const std::vector<int> chosen = stage_->choose(chunk, last);
      WireHeader header;
      header.kind = int32_t(Wire::kVerdict);
      header.epoch = chunk.epoch;
      header.start = chunk.start + chunk.rows() - last;
      header.count = rows;
      header.siblings = bits_of(chunk.siblings, header.start);
      header.flags = flags | asked_;
      header.sent = wire_clock();
      write_header(header, out);
      std::copy(chosen.begin(), chosen.end(), out + kWireIds);
      const size_t carried = asked_ & kWireFeedback ? size_t(rows) * hidden_ : 0;
      std::memcpy(out + kWireRows, chunk.hidden.data() + chunk.hidden.size() - carried, carried * 4);
      if (asked_ & kWireLogprob) {
        std::vector<Logprobs> logprobs = stage_->take_logprobs();
        logprobs.resize(size_t(rows));
        write_logprobs(logprobs, out + kWireRows + carried);
      }
      written = 1;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (done) {
    ++counts_.passes;
    counts_.rows += chunk.rows();
    counts_.seconds += std::chrono::duration<double>(Clock::now() - begun).count();
  } else {
    ++counts_.dropped_passes;
    scope.rename("dropped verify");
  }
  return written;
}

// One message for every kMaxRows rows; a pass stays a pass, only prompts are cut anew.
int Station::forward(const Chunk& chunk, int32_t flags, int32_t* out) const {
  int written = 0;
  for (int done = 0; done < chunk.all_rows(); done += kMaxRows, ++written) {
    const bool more = done + kMaxRows < chunk.all_rows();
    int32_t* message = out + most_words(hidden_) * written;
    const int prompt_flags = more ? flags & ~kWirePromptEnd : flags;
    if (flags & kWirePrompt) write_rows(chunk, done, hidden_, prompt_rows_, prompt_flags, message);
    else write_rows(chunk, done, hidden_, chunk.rows(), kWireWhole, message);
  }
  return written;
}

// -- what others see ---------------------------------------------------------------------------------------------------

double Station::busy_seconds() const {
  const int64_t since = busy_since_.load();
  return since > 0 ? double(wire_clock() - since) * 1e-9 : 0.0;
}

std::shared_ptr<const Trace> Station::trace() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return trace_;
}

StationCounts Station::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace ppsd
