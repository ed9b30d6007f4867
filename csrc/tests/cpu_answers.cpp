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

int64_t cpu_answers(std::chrono::steady_clock::time_point end, uint64_t seed) {
  const ModelShape shape = tiny_shape();
  Random random(seed);
  int64_t answers = 0;
  do {
    for (const Kernels* kernels : usable_kernels())
      for (Format format : {Format::kInt4, Format::kInt8, Format::kBf16, Format::kFp32}) {
        const std::string where = std::string("CPU library, ") + kernels->name + ", format " +
                                  std::to_string(int(format)) + ", answer " + std::to_string(answers);
        TinyWeights weights(shape, random());
        const auto model = tiny_model(*kernels, format, &weights, shape, chance(random, 30) ? 0 : 2);
        const std::vector<std::vector<int>> cuts = {{}, {4}, {3, 4}};
        CpuEngine engine(model, between(random, 1, 3), cuts[random() % cuts.size()]);
        Request request;
        request.sampling = random_sampling(random, shape.vocab_size);
        for (int i = between(random, 1, 90); i > 0; --i) request.prompt.push_back(between(random, 0, shape.vocab_size - 1));
        request.limits.end = std::min(int(request.prompt.size()) + between(random, 1, chance(random, 50) ? 60 : 220), kContext);
        const std::vector<int> plain = answer(&engine, request, nullptr, -1, where);
        if (request.sampling.mask) check_mask(plain, request.prompt.size(), where);
        for (int turn = 0; turn < 3; ++turn, ++answers) {
          request.schedule = random_schedule(random);
          if (request.sampling.looks_back()) request.schedule.siblings = 0.0;
          request.lock_step = chance(random, 20);
          request.report_drafts = chance(random, 50);
          answer(&engine, request, &plain, chance(random, 30) ? between(random, 0, 3000) : -1, where);
        }
        const std::vector<float> logits = engine.logits(request.prompt, 1);
        check(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }), "a logit is not finite", where);
      }
  } while (std::chrono::steady_clock::now() < end);
  return answers;
}

}  // namespace ppsd::test
