#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>

#include "../loop/loop.h"
#include "../loop/text_stages.h"
#include "check.h"
#include "tiny_model.h"

namespace ppsd::test {
namespace {

constexpr int kRequests = 9;
constexpr Format kFormats[] = {Format::kInt4, Format::kInt8, Format::kBf16, Format::kFp32};

// Plain decoding, by a loop as simple as there can be.
std::vector<int> plainly(const std::shared_ptr<const CpuModel>& model, int threads, const Request& request) {
  Sampling sampling = request.sampling;
  sampling.stop_ids = request.limits.stop_ids;
  TextStages stages(std::make_unique<CpuPasses>(model, make_shared_team(threads)), sampling);
  stages.begin(int(request.prompt.size()), sampling.seed);
  stages.reserve(request.limits.end);
  std::vector<int> text = request.prompt;
  for (int start = 0; int(text.size()) < request.limits.end;) {
    const std::vector<int> rows(text.begin() + start, text.end());
    stages.draft(start, rows, false);
    text.push_back(stages.verify(start, rows, 1).front());
    start = int(text.size()) - 1;
    if (std::count(sampling.stop_ids.begin(), sampling.stop_ids.end(), text.back()) > 0) break;
  }
  return text;
}

Request random_request(Random& random, const std::vector<int>& head, int vocabulary) {
  Request request;
  request.sampling = random_sampling(random, vocabulary);
  if (chance(random, 50)) request.prompt = head;
  const std::vector<int> own = random_prompt(random, 30, vocabulary);
  request.prompt.insert(request.prompt.end(), own.begin(), own.end());
  if (chance(random, 20)) request.limits.stop_ids = {between(random, 0, vocabulary - 1)};
  request.limits.end = std::min(int(request.prompt.size()) + between(random, 1, chance(random, 80) ? 50 : 200), kContext);
  return request;
}

// Reads an answer to its end, to where it is cancelled, or to where nobody wants it any more. How many tokens.
// grammar: its number, over ranks.
int64_t consume(Loop* loop, Request request, int grammar, const std::vector<int>& plain, uint64_t seed, const std::string& where) {
  Random random(seed);
  request.schedule = random_schedule(random);
  request.report_drafts = chance(random, 30);
  const bool automatic = chance(random, 40);
  std::vector<int> known = request.prompt;
  const int64_t before = int64_t(known.size());
  const auto out = loop->add(std::move(request), automatic, grammar);
  const int patience = chance(random, 25) ? between(random, 0, 20) : -1;
  Event event;
  double seconds = 0.0;
  for (int events = 0; events != patience;) {
    const AnswerEvents::Status status = out->next(1000, &event, &seconds);
    if (status == AnswerEvents::Status::kEnded) break;
    if (status == AnswerEvents::Status::kWaiting) continue;
    ++events;
    if (const Round* round = std::get_if<Round>(&event)) check_round(*round, plain, &known, where);
  }
  if (patience < 0) check(known == plain, "the answer is shorter than plain decoding's", where);
  else if (chance(random, 50)) out->end();
  else out->cancel();
  return int64_t(known.size()) - before;
}

// The late layers on a rank of its own, and both ranks in threads: what goes from one to the other is words.
class TwoRanks {
 public:
  // stages: that the loop believes in: where answers are fewer, they draft while they are verified.
  TwoRanks(const std::shared_ptr<const CpuModel>& model, int threads, int stages, int blocks, LoopLimits limits,
           PassStage::Masks masks)
      : model_(*model),
        loop_(std::make_unique<CpuPasses>(model, std::make_unique<Team>(threads, std::vector<int>()), std::vector<int>(), false),
              blocks, limits, stages),
        stage_(model, model->exit_layer, model->shape.num_layers, {}, 1, size_t(1) << 26) {
    stage_.passes().use(std::move(masks));
    ranks_.emplace_back([this] { lead(); });
    ranks_.emplace_back([this] { verify(); });
  }
  ~TwoRanks() {
    stop_.store(true);
    ranks_.clear();
  }
  Loop& loop() { return loop_; }

 private:
  void lead() {
    std::vector<int32_t> out(most_pass_words(model_.shape.hidden_size));
    while (!stop_.load()) {
      if (const size_t words = loop_.work(out.data(), 5)) stage_.inbox().post(out.data(), words);
    }
  }
  void verify() {
    std::vector<int32_t> out(most_pass_words(model_.shape.hidden_size));
    while (!stop_.load())
      if (const size_t words = stage_.inbox().work(out.data(), 5)) loop_.ranks()->land(out.data(), words);
  }

  const CpuModel& model_;
  Loop loop_;
  CpuStation stage_;
  std::atomic<bool> stop_{false};
  std::deque<Helper> ranks_;
};

}  // namespace

Played many_answers(const Enough& enough, uint64_t seed) {
  const ModelShape shape = tiny_shape();
  Random random(seed);
  Played played;
  do {
    const std::vector<const Kernels*> usable = usable_kernels();
    const Kernels* kernels = usable[random() % usable.size()];
    const Format format = kFormats[random() % 4];
    const std::string where = std::string("loop, ") + kernels->name + ", format " + std::to_string(int(format)) +
                              ", answer " + std::to_string(played.answers);
    TinyWeights weights(shape, random());
    const bool over_ranks = chance(random, 30), by_length = !over_ranks && chance(random, 15);
    const auto model = tiny_model(*kernels, format, &weights, shape, chance(random, 30) ? 0 : 2, by_length);
    std::vector<int> head;
    for (int i = 0; i < 70; ++i) head.push_back(between(random, 0, shape.vocab_size - 1));
    std::vector<Request> requests;
    std::vector<std::vector<int>> plain;
    for (int i = 0; i < kRequests; ++i) {
      requests.push_back(random_request(random, head, shape.vocab_size));
      plain.push_back(plainly(model, between(random, 1, 2), requests.back()));
    }
    const int threads = between(random, 1, 3), blocks = between(random, kContext / kSpan, 12);
    LoopLimits limits{by_length ? 1 : between(random, 1, 8), between(random, 1, 16)};
    std::unique_ptr<LoopThread> here;
    std::unique_ptr<TwoRanks> ranks;
    if (over_ranks) {
      const auto masks = [&](int grammar) { return requests[size_t(grammar - 1)].sampling.mask; };
      ranks = std::make_unique<TwoRanks>(model, threads, between(random, 2, 8), blocks, limits, masks);
    } else {
      const std::vector<std::vector<int>> cuts = {{}, {4}, {3, 4}};
      if (chance(random, 80)) limits.cuts = cuts[random() % cuts.size()];
      auto passes = std::make_unique<CpuPasses>(model, make_shared_team(threads));
      here = std::make_unique<LoopThread>(std::make_unique<Loop>(std::move(passes), blocks, limits));
    }
    Loop* loop = here ? &here->loop() : &ranks->loop();
    std::deque<Helper> consumers;
    std::atomic<int64_t> tokens{0};
    const int count = chance(random, 50) ? 1 : 3;   // one: every answer is alone
    for (int consumer = 0; consumer < count; ++consumer)
      consumers.emplace_back([&, count, consumer, first = random()] {
        for (int i = consumer; i < kRequests; i += count)
          tokens += consume(loop, requests[i], requests[i].sampling.mask ? i + 1 : 0, plain[i], first + uint64_t(i), where);
      });
    consumers.clear();
    played.answers += kRequests;
    played.tokens += tokens;
  } while (!enough(played));
  return played;
}

}  // namespace ppsd::test
