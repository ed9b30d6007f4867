#include "cpu_answers.h"

#include <cmath>
#include <memory>
#include <thread>

#include "../cpu/session.h"
#include "check.h"
#include "tiny_model.h"

namespace ppsd::test {
namespace {

std::vector<int> answer(CpuEngine* engine, const Request& request, const std::vector<int>* plain, int patience_us,
                        const std::string& where) {
  Session session(engine, request, nullptr);
  const Helper interrupter([&] {
    if (patience_us < 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(patience_us));
    session.cancel();
  });
  std::vector<int> known = request.prompt;
  Event event;
  double seconds = 0.0;
  for (;;) {
    const Session::Status status = session.next(1000, &event, &seconds);
    if (status == Session::Status::kEnded) break;
    if (status == Session::Status::kWaiting) continue;
    const Round* round = std::get_if<Round>(&event);
    if (round != nullptr && plain != nullptr) check_round(*round, *plain, &known, where);
    if (round != nullptr && plain == nullptr) known.insert(known.end(), round->committed.begin(), round->committed.end());
  }
  if (plain != nullptr && patience_us < 0) check(known == *plain, "the answer is shorter than plain decoding's", where);
  return known;
}

}  // namespace

Played cpu_answers(const Enough& enough, uint64_t seed) {
  const ModelShape shape = tiny_shape();
  Random random(seed);
  Played played;
  do {
    for (const Kernels* kernels : usable_kernels())
      for (Format format : {Format::kInt4, Format::kInt8, Format::kBf16, Format::kFp32}) {
        const std::string where = std::string("CPU library, ") + kernels->name + ", format " +
                                  std::to_string(int(format)) + ", answer " + std::to_string(played.answers);
        TinyWeights weights(shape, random());
        const auto model = tiny_model(*kernels, format, &weights, shape, chance(random, 30) ? 0 : 2);
        const std::vector<std::vector<int>> cuts = {{}, {4}, {3, 4}};
        CpuEngine engine(model, between(random, 1, 3), cuts[random() % cuts.size()]);
        Request request;
        request.sampling = random_sampling(random, shape.vocab_size);
        request.prompt = random_prompt(random, 90, shape.vocab_size);
        if (chance(random, 20)) request.limits.stop_ids = {between(random, 0, shape.vocab_size - 1)};
        request.limits.end = std::min(int(request.prompt.size()) + between(random, 1, chance(random, 50) ? 60 : 220), kContext);
        const std::vector<int> plain = answer(&engine, request, nullptr, -1, where);
        if (request.sampling.mask) check_mask(plain, request.prompt.size(), where);
        for (int turn = 0; turn < 3; ++turn, ++played.answers) {
          request.schedule = random_schedule(random);
          if (request.sampling.looks_back()) request.schedule.siblings = 0.0;
          request.lock_step = chance(random, 20);
          request.report_drafts = chance(random, 50);
          const int patience = chance(random, 30) ? between(random, 0, 3000) : -1;
          played.tokens += int64_t(answer(&engine, request, &plain, patience, where).size() - request.prompt.size());
        }
        const std::vector<float> logits = engine.logits(request.prompt, 1);
        check(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }), "a logit is not finite", where);
      }
  } while (!enough(played));
  return played;
}

}  // namespace ppsd::test
