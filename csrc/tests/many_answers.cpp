#include "many_answers.h"

#include <atomic>
#include <deque>
#include <memory>

#include "../cpu/session.h"
#include "../serving/thread.h"
#include "check.h"
#include "tiny_model.h"

namespace ppsd::test {
namespace {

constexpr int kRequests = 9, kConsumers = 3;
constexpr Format kFormats[] = {Format::kInt4, Format::kInt8, Format::kBf16, Format::kFp32};

std::vector<int> alone(CpuEngine* engine, const Request& request) {
  Session session(engine, request, nullptr);
  std::vector<int> text = request.prompt;
  Event event;
  double seconds = 0.0;
  for (Session::Status status; (status = session.next(1000, &event, &seconds)) != Session::Status::kEnded;)
    if (const Round* round = status == Session::Status::kEvent ? std::get_if<Round>(&event) : nullptr)
      text.insert(text.end(), round->committed.begin(), round->committed.end());
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
int64_t consume(Loop* loop, Request request, const std::vector<int>& plain, uint64_t seed, const std::string& where) {
  Random random(seed);
  request.schedule = random_schedule(random);
  request.report_drafts = chance(random, 30);
  const bool automatic = chance(random, 40);
  // Some go on from where another decoder has brought them.
  const int most = int(plain.size() - request.prompt.size()) - 1;
  const int committed = most > 0 && chance(random, 20) ? between(random, 1, most) : 0;
  std::vector<int> known(plain.begin(), plain.begin() + long(request.prompt.size()) + committed);
  request.prompt = known;
  const int64_t before = int64_t(known.size());
  const auto out = loop->add(std::move(request), automatic, committed);
  const int patience = chance(random, 25) ? between(random, 0, 20) : -1;
  Event event;
  double seconds = 0.0;
  for (int events = 0; events != patience;) {
    const Outbox::Status status = out->next(1000, &event, &seconds);
    if (status == Outbox::Status::kEnded) break;
    if (status == Outbox::Status::kWaiting) continue;
    ++events;
    if (const Round* round = std::get_if<Round>(&event)) check_round(*round, plain, &known, where);
  }
  if (patience < 0) check(known == plain, "the answer is shorter than plain decoding's", where);
  else if (chance(random, 50)) out->end();
  else out->cancel();
  return int64_t(known.size()) - before;
}

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
    const auto model = tiny_model(*kernels, format, &weights, shape, chance(random, 30) ? 0 : 2);
    CpuEngine engine(model, between(random, 1, 2), {});
    std::vector<int> head;
    for (int i = 0; i < 70; ++i) head.push_back(between(random, 0, shape.vocab_size - 1));
    std::vector<Request> requests;
    std::vector<std::vector<int>> plain;
    for (int i = 0; i < kRequests; ++i) {
      requests.push_back(random_request(random, head, shape.vocab_size));
      plain.push_back(alone(&engine, requests.back()));
    }
    const int threads = between(random, 1, 2), blocks = between(random, kContext / kSpan, 12);
    const size_t block_bytes = Passes(model, 1).block_bytes();
    LoopThread thread(std::make_unique<Loop>(model, threads, block_bytes * size_t(blocks),
                                             LoopLimits{between(random, 1, 8), between(random, 1, 16), {}}));
    if (chance(random, 50)) thread.import_prefix(engine);
    std::deque<Helper> consumers;
    std::atomic<int64_t> tokens{0};
    for (int consumer = 0; consumer < kConsumers; ++consumer)
      consumers.emplace_back([&, consumer, first = random()] {
        for (int i = consumer; i < kRequests; i += kConsumers)
          tokens += consume(&thread.loop(), requests[i], plain[i], first + uint64_t(i), where);
      });
    consumers.clear();
    played.answers += kRequests;
    played.tokens += tokens;
  } while (!enough(played));
  return played;
}

}  // namespace ppsd::test
