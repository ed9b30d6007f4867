// Functions of sixteen floats at a time. What all kernels of one instruction set begin with.
#pragma once

#include <cstdint>
#include <limits>

#include "../half.h"
#include "../kernels.h"

namespace ppsd {
namespace {

using V = Simd::V;
using I = Simd::I;

// For loops over the sums of a micro-kernel: unrolled early, so that the sums live in registers from the start.
#if defined(__clang__)
#define PPSD_UNROLL _Pragma("unroll")
#else
#define PPSD_UNROLL _Pragma("GCC unroll 16")
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// e^x; 0 below -87 and for -inf, 2.4e38 at most. Polynomial of Cephes (expf), relative error below 2e-7.
inline V exp(V x) {
  const V low = Simd::set1(-87.0f);
  const V clamped = Simd::min(Simd::max(x, low), Simd::set1(88.3f));
  const V n = Simd::round(Simd::mul(clamped, Simd::set1(1.44269504088896341f)));
  V r = Simd::fma(n, Simd::set1(-0.693359375f), clamped);
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  V p = Simd::set1(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = Simd::fma(p, r, Simd::set1(c));
  p = Simd::add(Simd::fma(p, Simd::mul(r, r), r), Simd::set1(1.0f));
  const I exponent = Simd::shift_left(Simd::addi(Simd::to_int(n), Simd::seti(127)), 23);
  return Simd::select(Simd::less(x, low), Simd::zero(), Simd::mul(p, Simd::bits_to_float(exponent)));
}

// 2^x for x <= 0, to be rounded to a few bits: relative error below 3e-6; 0 below -60 and for -inf. (Numbers that are almost
// too small for a float would cost a hundred times as much to multiply.)
inline V exp2_rough(V x) {
  const V low = Simd::set1(-60.0f), clamped = Simd::max(low, x);
  const V n = Simd::round(clamped), f = Simd::sub(clamped, n);
  V p = Simd::set1(0.009582853f);   // the least maximum of the error that this degree has on [-1/2, 1/2], with p(0) = 1
  for (float c : {0.055906426f, 0.24024099f, 0.69312418f, 1.0f}) p = Simd::fma(p, f, Simd::set1(c));
  return Simd::select(Simd::less(x, low), Simd::zero(), Simd::scale2(p, n));
}

// Natural logarithm of x > 0 (normal). Polynomial of Cephes (logf).
inline V log(V x) {
  const I bits = Simd::float_to_bits(x);
  const I mantissa = Simd::bit_or(Simd::bit_and(bits, Simd::seti(0x007FFFFF)), Simd::seti(0x3F000000));
  V m = Simd::bits_to_float(mantissa);   // [0.5, 1)
  V e = Simd::to_float(Simd::addi(Simd::shift_right(bits, 23), Simd::seti(-126)));
  const auto small = Simd::less(m, Simd::set1(0.707106781186547524f));
  e = Simd::sub(e, Simd::select(small, Simd::set1(1.0f), Simd::zero()));
  m = Simd::sub(Simd::add(m, Simd::select(small, m, Simd::zero())), Simd::set1(1.0f));
  const V z = Simd::mul(m, m);
  V p = Simd::set1(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = Simd::fma(p, m, Simd::set1(c));
  p = Simd::mul(Simd::mul(p, m), z);
  p = Simd::fma(e, Simd::set1(-2.12194440e-4f), p);
  p = Simd::fma(z, Simd::set1(-0.5f), p);
  return Simd::fma(e, Simd::set1(0.693359375f), Simd::add(m, p));
}

inline V silu(V x) {
  return Simd::div(x, Simd::add(Simd::set1(1.0f), exp(Simd::sub(Simd::zero(), x))));
}

}  // namespace
}  // namespace ppsd
