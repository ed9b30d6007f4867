// The LM head: scores, the best of them with or without noise, or several.
#pragma once

#include <algorithm>
#include <vector>

#include "matmul.h"
#include "noise.h"

namespace ppsd {
namespace {

inline V penalise(const LogitsPhase& phase, int position, const int32_t* ids, V y) {
  int32_t seen_at[16];
  for (int l = 0; l < 16; ++l) seen_at[l] = phase.first_seen[ids[l]];
  const auto seen = Simd::less_i(Simd::loadi(seen_at), Simd::seti(position));
  if (!Simd::any(seen)) return y;
  const V penalty = Simd::set1(phase.repetition_penalty);
  const V lower = Simd::select(Simd::less(y, Simd::zero()), Simd::mul(y, penalty), Simd::div(y, penalty));
  return Simd::select(seen, lower, y);
}

inline void store_scores(const LogitsPhase& phase, int r, int index, int count, V y) {
  float* out = phase.logits + size_t(r) * phase.stride + index;
  if (count == kPanel) return Simd::store(out, y);
  float scores[16];
  Simd::store(scores, y);
  std::copy(scores, scores + count, out);
}

inline void choose_top(V scores, const int32_t* ids, int count, int most, std::vector<Candidate>* top) {
  if (int(top->size()) >= most && !Simd::any(Simd::less(Simd::set1(top->front().score), scores))) return;
  float some[16];
  Simd::store(some, scores);
  for (int l = 0; l < count; ++l) keep_best(top, most, {some[l], ids[l]});
}

inline bool all_finite(V y) {
  return !Simd::any(Simd::less_i(Simd::seti(0x7F7FFFFF), Simd::float_to_bits(Simd::abs(y))));
}

void logits(const LogitsPhase& phase, int begin, int end) {
  const int outputs = phase.weights->outputs;
  Noise noise[kPassRows];
  for (int r = 0; r < phase.rows && phase.choice == Choice::kBest; ++r)
    noise[r] = Noise(phase.each ? phase.each[r].seed : phase.seed, phase.positions[r]);
  V nothing = Simd::zero();   // stays so as long as all logits are finite, of whatever row
  multiply(*phase.weights, *phase.input, {}, begin, end, [&](int r, int p, V y) {
    nothing = Simd::fma(y, Simd::zero(), nothing);   // every way of choosing comes by here
    const int index = p * kPanel, count = std::min(kPanel, outputs - index);
    if (phase.choice == Choice::kStore) return store_scores(phase, r, index, count, y);
    // Few panels hold anything new: most are done after one comparison.
    const float inverse_temperature = phase.each ? phase.each[r].inverse_temperature : phase.inverse_temperature;
    const auto beaten = [&] { return phase.choice == Choice::kBest && !may_win(y, inverse_temperature, phase.best[r]); };
    if (!phase.first_seen && beaten()) return;
    int32_t ids[16];
    for (int l = 0; l < 16; ++l) {
      const int i = std::min(index + l, outputs - 1);
      ids[l] = phase.draft_ids ? phase.draft_ids[i] : i;
    }
    if (phase.first_seen) y = penalise(phase, phase.positions[r], ids, y);
    if (phase.first_seen && beaten()) return;
    if (phase.choice == Choice::kTop) choose_top(y, ids, count, phase.top_k, &phase.top[r]);
    else if (inverse_temperature == 0.0f) choose_best(y, ids, count, &phase.best[r]);
    else choose_noisy(y, inverse_temperature, noise[r], ids, count, &phase.best[r]);
  });
  if (all_finite(nothing)) return;
  multiply(*phase.weights, *phase.input, {}, begin, end, [&](int r, int, V y) {   // once more: which rows?
    if (!all_finite(y)) phase.strange[r] = 1;
  });
}

void soft_sum(const float* x, int n, float scale, float* max, float* sum) {
  const int whole = n / 16 * 16;
  float rest[16];
  std::fill(rest, rest + 16, -kInfinity);
  std::copy(x + whole, x + n, rest);
  V largest = Simd::load(rest);
  for (int i = 0; i < whole; i += 16) largest = Simd::max(largest, Simd::load(x + i));
  *max = Simd::max_lanes(largest);
  const V top = Simd::set1(*max), factor = Simd::set1(scale);
  V total = exp(Simd::mul(Simd::sub(Simd::load(rest), top), factor));
  for (int i = 0; i < whole; i += 16)
    total = Simd::add(total, exp(Simd::mul(Simd::sub(Simd::load(x + i), top), factor)));
  *sum = Simd::sum_lanes(total);
}

}  // namespace
}  // namespace ppsd
