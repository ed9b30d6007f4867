// What instructions do with registers: arithmetic, comparisons, conversions, exchange between the lanes of a warp.
//
// All lanes at once; where some are not active, theirs stay. Values narrower than 32 bits are kept zero-extended.
#include <cmath>
#include <cstring>
#include <functional>

#include "units.h"
#include "warp.h"

namespace virtual_gpu {
namespace {

using Names = std::vector<std::string>;

template <class T> struct Lanes { T at[kLanes]; };

// to = f(from...), T being the type of all of them or each having its own.
template <class R, class A, class F> void map1(Warp& w, const Instruction& i, F f) {
  const A* a = w.lanes<A>(i.from[0]);
  R* to = w.lanes<R>(i.to[0]);
  Lanes<R> result;
  for (int l = 0; l < kLanes; ++l) result.at[l] = R(f(a[l]));
  for (int l = 0; l < kLanes; ++l) to[l] = w.active >> l & 1 ? result.at[l] : to[l];
}
template <class R, class A, class B, class F> void map2(Warp& w, const Instruction& i, F f) {
  const A* a = w.lanes<A>(i.from[0]);
  const B* b = w.lanes<B>(i.from[1]);
  R* to = w.lanes<R>(i.to[0]);
  Lanes<R> result;
  for (int l = 0; l < kLanes; ++l) result.at[l] = R(f(a[l], b[l]));
  for (int l = 0; l < kLanes; ++l) to[l] = w.active >> l & 1 ? result.at[l] : to[l];
}
template <class R, class A, class C, class F> void map3(Warp& w, const Instruction& i, F f) {
  const A *a = w.lanes<A>(i.from[0]), *b = w.lanes<A>(i.from[1]);
  const C* c = w.lanes<C>(i.from[2]);
  R* to = w.lanes<R>(i.to[0]);
  Lanes<R> result;
  for (int l = 0; l < kLanes; ++l) result.at[l] = R(f(a[l], b[l], c[l]));
  for (int l = 0; l < kLanes; ++l) to[l] = w.active >> l & 1 ? result.at[l] : to[l];
}

float bits(uint32_t word) { float number; std::memcpy(&number, &word, 4); return number; }
uint32_t word(float number) { uint32_t its; std::memcpy(&its, &number, 4); return its; }
float low(uint32_t pair) { return bits(pair << 16); }
float high(uint32_t pair) { return bits(pair & 0xFFFF0000u); }
uint32_t to_bf16(float number) {
  const uint32_t its = word(number);
  return number != number ? 0x7FFFu : (its + 0x7FFFu + (its >> 16 & 1)) >> 16;
}
uint32_t pair(float first, float second) { return to_bf16(first) | to_bf16(second) << 16; }
float flush(float number) { return std::fabs(number) < 1.17549435e-38f ? std::copysign(0.0f, number) : number; }

uint32_t to_f16(float number) {   // round to nearest even
  const uint32_t its = word(number), sign = its >> 16 & 0x8000;
  const float size = std::fabs(number);
  if (number != number) return 0x7FFF;
  if (size >= 65520.0f) return sign | 0x7C00;
  if (size < 6.103515625e-05f) return sign | uint32_t(std::nearbyint(size * 16777216.0f));
  const uint32_t rounded = (its & 0x7FFFFFFF) + 0xFFF + (its >> 13 & 1);
  return sign | ((rounded - 0x38000000u) >> 13);
}
float from_f16(uint32_t half) {
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023, sign = (half & 0x8000) << 16;
  if (exponent == 31) return bits(sign | 0x7F800000 | mantissa << 13);
  if (exponent == 0) return std::copysign(float(mantissa) * 5.9604644775390625e-08f, bits(sign));
  return bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
float from_e4m3(uint32_t byte) {
  const int exponent = int(byte >> 3 & 15), mantissa = int(byte & 7);
  const float size = exponent == 15 && mantissa == 7 ? NAN : exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
  return byte & 128 ? -size : size;
}

template <class T> T clamped(double number) {
  if (number != number) return 0;
  if (number <= double(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (number >= double(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return T(number);
}

int signed16(uint32_t value) { return int(int16_t(value)); }

// -- comparisons -------------------------------------------------------------------------------------------------------

enum Comparison { kEqual, kOther, kLess, kLessEqual, kGreater, kGreaterEqual, kNumbers, kNan };

template <class T> bool compare(int how, T a, T b) {
  switch (how) {
    case kEqual: return a == b;
    case kOther: return a != b && a == a && b == b;
    case kLess: return a < b;
    case kLessEqual: return a <= b;
    case kGreater: return a > b;
    case kGreaterEqual: return a >= b;
    case kNumbers: return a == a && b == b;
    default: return a != a || b != b;
  }
}

template <class T, int kHow, bool kUnordered> void setp(Warp& w, const Instruction& i) {
  const T *a = w.lanes<T>(i.from[0]), *b = w.lanes<T>(i.from[1]);
  uint32_t mask = 0;
  for (int l = 0; l < kLanes; ++l) mask |= uint32_t(compare<T>(kHow, a[l], b[l]) || (kUnordered && (a[l] != a[l] || b[l] != b[l]))) << l;
  uint32_t& to = w.predicate(i.to[0]);
  to = (mask & w.active) | (to & ~w.active);
}

template <class T, int kHow> Handler comparison(bool unordered) { return unordered ? setp<T, kHow, true> : setp<T, kHow, false>; }
template <class T> Handler comparison(const std::string& name, bool number) {
  std::string how = name;
  bool unordered = false;
  if (number && how.size() == 3 && how.back() == 'u') unordered = true, how.pop_back();
  if (how == "eq") return comparison<T, kEqual>(unordered);
  if (how == "ne") return comparison<T, kOther>(unordered);
  if (how == "lt" || how == "lo") return comparison<T, kLess>(unordered);
  if (how == "le" || how == "ls") return comparison<T, kLessEqual>(unordered);
  if (how == "gt" || how == "hi") return comparison<T, kGreater>(unordered);
  if (how == "ge" || how == "hs") return comparison<T, kGreaterEqual>(unordered);
  if (how == "num") return comparison<T, kNumbers>(false);
  if (how == "nan") return comparison<T, kNan>(false);
  return nullptr;
}

// -- moves -------------------------------------------------------------------------------------------------------------

uint32_t predicate_of(Warp& w, const Operand& o) {
  return o.constant ? (o.value ? ~0u : 0u) : w.predicate(o);
}
void set_predicate(Warp& w, const Instruction& i, uint32_t mask) {
  uint32_t& to = w.predicate(i.to[0]);
  to = (mask & w.active) | (to & ~w.active);
}
void move_predicate(Warp& w, const Instruction& i) { set_predicate(w, i, predicate_of(w, i.from[0])); }
void and_predicates(Warp& w, const Instruction& i) { set_predicate(w, i, predicate_of(w, i.from[0]) & predicate_of(w, i.from[1])); }
void or_predicates(Warp& w, const Instruction& i) { set_predicate(w, i, predicate_of(w, i.from[0]) | predicate_of(w, i.from[1])); }
void xor_predicates(Warp& w, const Instruction& i) { set_predicate(w, i, predicate_of(w, i.from[0]) ^ predicate_of(w, i.from[1])); }
void not_predicate(Warp& w, const Instruction& i) { set_predicate(w, i, ~predicate_of(w, i.from[0])); }
void move32(Warp& w, const Instruction& i) { map1<uint32_t, uint32_t>(w, i, [](uint32_t a) { return a; }); }
void move64(Warp& w, const Instruction& i) { map1<uint64_t, uint64_t>(w, i, [](uint64_t a) { return a; }); }

// One value of `option` bits of several narrow ones, or the other way round.
void pack(Warp& w, const Instruction& i) {
  const int parts = int(i.from.size()), each = i.option / parts;
  Lanes<uint64_t> whole = {};
  for (int p = 0; p < parts; ++p)
    for (int l = 0; l < kLanes; ++l) whole.at[l] |= uint64_t(w.lanes<uint32_t>(i.from[size_t(p)])[l]) << (each * p);
  for (int l = 0; l < kLanes; ++l)
    if (w.active >> l & 1) {
      if (i.option == 64) w.lanes<uint64_t>(i.to[0])[l] = whole.at[l];
      else w.lanes<uint32_t>(i.to[0])[l] = uint32_t(whole.at[l]);
    }
}
void unpack(Warp& w, const Instruction& i) {
  const int parts = int(i.to.size()), each = i.option / parts;
  Lanes<uint64_t> whole;
  for (int l = 0; l < kLanes; ++l) whole.at[l] = i.option == 64 ? w.lanes<uint64_t>(i.from[0])[l] : w.lanes<uint32_t>(i.from[0])[l];
  for (int p = 0; p < parts; ++p) {
    if (i.to[size_t(p)].kind == Operand::kSink) continue;
    uint32_t* to = w.lanes<uint32_t>(i.to[size_t(p)]);
    for (int l = 0; l < kLanes; ++l)
      if (w.active >> l & 1) to[l] = uint32_t(whole.at[l] >> (each * p) & (each == 32 ? 0xFFFFFFFFu : (1u << each) - 1));
  }
}

template <class T> void select(Warp& w, const Instruction& i) {
  const T *a = w.lanes<T>(i.from[0]), *b = w.lanes<T>(i.from[1]);
  const uint32_t which = predicate_of(w, i.from[2]);
  T* to = w.lanes<T>(i.to[0]);
  for (int l = 0; l < kLanes; ++l) to[l] = !(w.active >> l & 1) ? to[l] : which >> l & 1 ? a[l] : b[l];
}

uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t whole = a | uint64_t(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t its = selector >> (4 * i) & 15;
    uint32_t byte = uint32_t(whole >> (8 * (its & 7))) & 255;
    if (its & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// -- between lanes -----------------------------------------------------------------------------------------------------

// All lanes that the instruction names have to be there; Machine sees to it (see `together`).
enum { kButterfly, kUp, kDown, kIndex };

void shuffle(Warp& w, const Instruction& i) {
  const Lanes<uint32_t> from = *w.lanes<Lanes<uint32_t>>(i.from[0]);
  const uint32_t *by = w.lanes<uint32_t>(i.from[1]), *clamp = w.lanes<uint32_t>(i.from[2]);
  uint32_t* to = w.lanes<uint32_t>(i.to[0]);
  for (int l = 0; l < kLanes; ++l) {
    if (!(w.active >> l & 1)) continue;
    const int segment = int(clamp[l] >> 8 & 31), s = int(by[l] & 31);
    const int least = l & segment, most = least | (int(clamp[l] & 31) & ~segment);
    const int other = i.option == kButterfly ? l ^ s : i.option == kUp ? l - s : i.option == kDown ? l + s : least | (s & ~segment);
    const bool inside = i.option == kUp ? other >= most : other <= most;
    const int source = inside ? other : l;
    if (!(w.active >> source & 1)) w.fail("reads the register of a lane that is not active");
    to[l] = from.at[source];
  }
}

template <class F> void reduce(Warp& w, const Instruction& i, F f) {
  const int32_t* from = w.lanes<int32_t>(i.from[0]);
  int32_t result = 0;
  bool first = true;
  for (int l = 0; l < kLanes; ++l)
    if (w.active >> l & 1) result = first ? from[l] : f(result, from[l]), first = false;
  int32_t* to = w.lanes<int32_t>(i.to[0]);
  for (int l = 0; l < kLanes; ++l)
    if (w.active >> l & 1) to[l] = result;
}
void reduce_add(Warp& w, const Instruction& i) { reduce(w, i, [](int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }); }
void reduce_min(Warp& w, const Instruction& i) { reduce(w, i, [](int32_t a, int32_t b) { return std::min(a, b); }); }
void reduce_max(Warp& w, const Instruction& i) { reduce(w, i, [](int32_t a, int32_t b) { return std::max(a, b); }); }

// -- parameters --------------------------------------------------------------------------------------------------------

void load_parameter(Warp& w, const Instruction& i) {
  uint64_t value = w.cta->grid->parameters[size_t(i.from[0].place)];
  if (i.sign && i.size == 4) value = uint64_t(int64_t(int32_t(value)));
  for (int l = 0; l < kLanes; ++l)
    if (w.active >> l & 1) {
      if (i.to[0].bits == 64) w.lanes<uint64_t>(i.to[0])[l] = value;
      else w.lanes<uint32_t>(i.to[0])[l] = uint32_t(value);
    }
}

void nothing(Warp&, const Instruction&) {}
void zero64(Warp& w, const Instruction& i) {
  for (int l = 0; l < kLanes; ++l) w.lanes<uint64_t>(i.to[0])[l] = 0;
}

// -- the table ---------------------------------------------------------------------------------------------------------

#define MAP1(R, A, expression) +[](Warp& w, const Instruction& i) { map1<R, A>(w, i, [](A a) { return expression; }); }
#define MAP2(R, A, B, expression) +[](Warp& w, const Instruction& i) { map2<R, A, B>(w, i, [](A a, B b) { return expression; }); }
#define MAP3(R, A, C, expression) +[](Warp& w, const Instruction& i) { map3<R, A, C>(w, i, [](A a, A b, C c) { return expression; }); }
using u32 = uint32_t;
using s32 = int32_t;
using u64 = uint64_t;
using s64 = int64_t;
using f32 = float;

// By operation and type, modifiers of rounding and precision left out.
const std::map<std::string, Handler>& table() {
  static const std::map<std::string, Handler> handlers = {
      {"add.f32", MAP2(f32, f32, f32, a + b)}, {"sub.f32", MAP2(f32, f32, f32, a - b)}, {"mul.f32", MAP2(f32, f32, f32, a * b)},
      {"div.f32", MAP2(f32, f32, f32, a / b)}, {"fma.f32", MAP3(f32, f32, f32, std::fma(a, b, c))},
      {"max.f32", MAP2(f32, f32, f32, a != a ? b : b != b ? a : a > b ? a : b)},
      {"min.f32", MAP2(f32, f32, f32, a != a ? b : b != b ? a : a < b ? a : b)},
      {"abs.f32", MAP1(f32, f32, std::fabs(a))}, {"neg.f32", MAP1(f32, f32, -a)}, {"sqrt.f32", MAP1(f32, f32, std::sqrt(a))},
      {"ex2.f32", MAP1(f32, f32, exp2f(a))}, {"ex2.ftz.f32", MAP1(f32, f32, flush(exp2f(flush(a))))},
      {"lg2.f32", MAP1(f32, f32, log2f(a))}, {"lg2.ftz.f32", MAP1(f32, f32, log2f(flush(a)))},
      {"rsqrt.f32", MAP1(f32, f32, 1.0 / std::sqrt(double(a)))}, {"rsqrt.ftz.f32", MAP1(f32, f32, 1.0 / std::sqrt(double(flush(a))))},
      {"rcp.f32", MAP1(f32, f32, 1.0f / a)}, {"rcp.ftz.f32", MAP1(f32, f32, 1.0f / flush(a))},
      {"add.s32", MAP2(u32, u32, u32, a + b)}, {"sub.s32", MAP2(u32, u32, u32, a - b)}, {"add.s64", MAP2(u64, u64, u64, a + b)},
      {"sub.s64", MAP2(u64, u64, u64, a - b)}, {"add.s16", MAP2(u32, u32, u32, (a + b) & 0xFFFF)},
      {"sub.s16", MAP2(u32, u32, u32, (a - b) & 0xFFFF)}, {"mul.lo.s16", MAP2(u32, u32, u32, (a * b) & 0xFFFF)},
      {"mul.lo.s32", MAP2(u32, u32, u32, a * b)}, {"mul.lo.s64", MAP2(u64, u64, u64, a * b)},
      {"mul.hi.u32", MAP2(u32, u32, u32, u64(a) * b >> 32)}, {"mul.hi.s32", MAP2(s32, s32, s32, s64(a) * b >> 32)},
      {"mul.wide.s32", MAP2(s64, s32, s32, s64(a) * b)}, {"mul.wide.u32", MAP2(u64, u32, u32, u64(a) * b)},
      {"mul.wide.u16", MAP2(u32, u32, u32, a * b)}, {"mul.wide.s16", MAP2(s32, u32, u32, signed16(a) * signed16(b))},
      {"mad.lo.s32", MAP3(u32, u32, u32, a * b + c)}, {"mad.lo.s64", MAP3(u64, u64, u64, a * b + c)},
      {"mad.wide.s32", MAP3(s64, s32, s64, s64(u64(s64(a) * b) + u64(c)))}, {"mad.wide.u32", MAP3(u64, u32, u64, u64(a) * b + c)},
      {"mad.wide.u16", MAP3(u32, u32, u32, a * b + c)},
      {"neg.s32", MAP1(u32, u32, 0u - a)}, {"neg.s64", MAP1(u64, u64, 0ull - a)}, {"neg.s16", MAP1(u32, u32, (0u - a) & 0xFFFF)},
      {"abs.s32", MAP1(s32, s32, a < 0 ? s32(0u - u32(a)) : a)},
      {"min.s32", MAP2(s32, s32, s32, a < b ? a : b)}, {"max.s32", MAP2(s32, s32, s32, a > b ? a : b)},
      {"min.relu.s32", MAP2(s32, s32, s32, std::max(a < b ? a : b, 0))}, {"max.relu.s32", MAP2(s32, s32, s32, std::max(a > b ? a : b, 0))},
      {"min.u32", MAP2(u32, u32, u32, a < b ? a : b)}, {"max.u32", MAP2(u32, u32, u32, a > b ? a : b)},
      {"min.s64", MAP2(s64, s64, s64, a < b ? a : b)}, {"max.s64", MAP2(s64, s64, s64, a > b ? a : b)},
      {"min.u64", MAP2(u64, u64, u64, a < b ? a : b)}, {"max.u64", MAP2(u64, u64, u64, a > b ? a : b)},
      {"and.b32", MAP2(u32, u32, u32, a & b)}, {"or.b32", MAP2(u32, u32, u32, a | b)}, {"xor.b32", MAP2(u32, u32, u32, a ^ b)},
      {"and.b16", MAP2(u32, u32, u32, a & b)}, {"or.b16", MAP2(u32, u32, u32, a | b)}, {"xor.b16", MAP2(u32, u32, u32, a ^ b)},
      {"and.b64", MAP2(u64, u64, u64, a & b)}, {"or.b64", MAP2(u64, u64, u64, a | b)}, {"xor.b64", MAP2(u64, u64, u64, a ^ b)},
      {"not.b32", MAP1(u32, u32, ~a)}, {"not.b64", MAP1(u64, u64, ~a)}, {"not.b16", MAP1(u32, u32, ~a & 0xFFFF)},
      {"shl.b32", MAP2(u32, u32, u32, b > 31 ? 0 : a << b)}, {"shl.b64", MAP2(u64, u64, u32, b > 63 ? 0 : a << b)},
      {"shl.b16", MAP2(u32, u32, u32, b > 15 ? 0 : (a << b) & 0xFFFF)}, {"shr.u32", MAP2(u32, u32, u32, b > 31 ? 0 : a >> b)},
      {"shr.u64", MAP2(u64, u64, u32, b > 63 ? 0 : a >> b)}, {"shr.u16", MAP2(u32, u32, u32, b > 15 ? 0 : a >> b)},
      {"shr.b32", MAP2(u32, u32, u32, b > 31 ? 0 : a >> b)}, {"shr.s32", MAP2(s32, s32, u32, a >> std::min(b, 31u))},
      {"shr.s64", MAP2(s64, s64, u32, a >> std::min(b, 63u))}, {"shr.s16", MAP2(u32, u32, u32, (signed16(a) >> std::min(b, 15u)) & 0xFFFF)},
      {"bfe.u32", MAP3(u32, u32, u32, c == 0 ? 0 : a >> b & (c > 31 ? ~0u : (1u << c) - 1))},
      {"bfe.s32", MAP3(s32, u32, u32, c == 0 ? 0 : s32(a << (32 - b - c)) >> (32 - c))},
      {"prmt.b32", MAP3(u32, u32, u32, permuted(a, b, c))},
      {"mul.bf16x2", MAP2(u32, u32, u32, pair(low(a) * low(b), high(a) * high(b)))},
      {"add.bf16x2", MAP2(u32, u32, u32, pair(low(a) + low(b), high(a) + high(b)))},
      {"fma.bf16x2", MAP3(u32, u32, u32, pair(float(double(low(a)) * low(b) + low(c)), float(double(high(a)) * high(b) + high(c))))},
      {"mul.bf16", MAP2(u32, u32, u32, to_bf16(low(a) * low(b)))}, {"fma.bf16", MAP3(u32, u32, u32, to_bf16(float(double(low(a)) * low(b) + low(c))))},
      {"mov.b32", move32}, {"mov.u32", move32}, {"mov.f32", move32}, {"mov.b16", move32}, {"mov.u16", move32}, {"mov.b64", move64},
      {"mov.u64", move64}, {"mov.pred", move_predicate}, {"and.pred", and_predicates}, {"or.pred", or_predicates},
      {"xor.pred", xor_predicates}, {"not.pred", not_predicate},
      {"cvta.u64", move64}, {"cvta.to.u64", move64},
      {"selp.b32", select<u32>}, {"selp.f32", select<u32>}, {"selp.b16", select<u32>}, {"selp.b64", select<u64>}, {"selp.s32", select<u32>},
      {"redux.sync.add.s32", reduce_add}, {"redux.sync.min.s32", reduce_min}, {"redux.sync.max.s32", reduce_max},
      {"cvt.bf16x2.f32", MAP2(u32, f32, f32, pair(b, a))}, {"cvt.f16x2.f32", MAP2(u32, f32, f32, to_f16(b) | to_f16(a) << 16)},
      {"cvt.f16x2.e4m3x2", MAP1(u32, u32, to_f16(from_e4m3(a & 255)) | to_f16(from_e4m3(a >> 8)) << 16)},
      {"cvt.bf16.f32", MAP1(u32, f32, to_bf16(a))}, {"cvt.f16.f32", MAP1(u32, f32, to_f16(a))}, {"cvt.f32.bf16", MAP1(f32, u32, low(a))},
      {"cvt.f32.f16", MAP1(f32, u32, from_f16(a & 0xFFFF))}, {"cvt.bf16.f16", MAP1(u32, u32, to_bf16(from_f16(a & 0xFFFF)))},
      {"cvt.f32.s32", MAP1(f32, s32, f32(a))}, {"cvt.f32.u32", MAP1(f32, u32, f32(a))}, {"cvt.f32.s16", MAP1(f32, u32, f32(signed16(a)))},
      {"cvt.f32.u16", MAP1(f32, u32, f32(a))}, {"cvt.f32.s8", MAP1(f32, u32, f32(int8_t(a)))},
      {"cvt.s32.s8", MAP1(s32, u32, s32(int8_t(a)))}, {"cvt.s16.s8", MAP1(u32, u32, u32(s32(int8_t(a))) & 0xFFFF)},
      {"cvt.s8.s32", MAP1(u32, u32, u32(s32(int8_t(a))) & 0xFFFF)}, {"cvt.s32.s16", MAP1(s32, u32, signed16(a))},
      {"cvt.u32.u16", MAP1(u32, u32, a & 0xFFFF)}, {"cvt.u32.u8", MAP1(u32, u32, a & 255)}, {"cvt.u16.u32", MAP1(u32, u32, a & 0xFFFF)},
      {"cvt.u16.u64", MAP1(u32, u64, u32(a) & 0xFFFF)}, {"cvt.u16.u8", MAP1(u32, u32, a & 255)},
      {"cvt.u64.u32", MAP1(u64, u32, a)}, {"cvt.s64.s32", MAP1(s64, s32, a)}, {"cvt.u32.u64", MAP1(u32, u64, u32(a))},
      {"cvt.u64.u16", MAP1(u64, u32, a & 0xFFFF)}, {"cvt.s64.s16", MAP1(s64, u32, signed16(a))},
      {"cvt.rzi.s32.f32", MAP1(s32, f32, clamped<s32>(std::trunc(double(a))))}, {"cvt.rni.s32.f32", MAP1(s32, f32, clamped<s32>(std::nearbyint(double(a))))},
      {"cvt.rzi.u32.f32", MAP1(u32, f32, clamped<u32>(std::trunc(double(a))))},
      {"cvt.rpi.f32.f32", MAP1(f32, f32, std::ceil(a))}, {"cvt.rmi.f32.f32", MAP1(f32, f32, std::floor(a))},
      {"cvt.rzi.f32.f32", MAP1(f32, f32, std::trunc(a))}, {"cvt.rni.f32.f32", MAP1(f32, f32, std::nearbyint(a))},
      {"ld.param", load_parameter}, {"createpolicy.fractional.L2::evict_first.b64", zero64}, {"createpolicy.fractional.L2::evict_last.b64", zero64},
      {"griddepcontrol.wait", nothing}, {"griddepcontrol.launch_dependents", nothing},   // Machine's, as are branches and barriers
      {"bar.sync", nothing}, {"bar.warp.sync", nothing}, {"bra", nothing}, {"ret", nothing}, {"fence.proxy.async.shared::cta", nothing},
      {"fence.proxy.async", nothing}, {"membar.gl", nothing},
  };
  return handlers;
}

bool among(const std::string& name, std::initializer_list<const char*> names) {
  for (const char* each : names)
    if (name == each) return true;
  return false;
}

}  // namespace

void bind(Instruction& its) {
  const Names& part = its.name;
  const std::string& first = part[0];
  const std::string& type = part.back();
  if (first == "bra") its.flow = Flow::kBranch;
  else if (first == "ret" || first == "exit") its.flow = Flow::kReturn;
  else if (first == "bar" && part[1] == "sync") its.flow = Flow::kBarrier;
  else if (first == "griddepcontrol") its.flow = part[1] == "wait" ? Flow::kWait : Flow::kTrigger;
  else if (among(first, {"bar", "shfl", "redux", "mma", "ldmatrix", "stmatrix", "wgmma"})) its.flow = Flow::kTogether;
  else if (among(first, {"atom", "red"}) || (first == "ld" && part[1] == "volatile") || (first == "st" && part[1] == "release")) its.flow = Flow::kTurn;
  if (bind_memory(its) || bind_matrix(its)) return;
  if (first == "setp") {
    const bool wide = type.find("64") != std::string::npos;
    if (type == "f32") its.run = comparison<float>(part[1], true);
    else if (type == "s16") throw Fault("not among the instructions that Triton has made so far: " + its.text);
    else if (type[0] == 's') its.run = wide ? comparison<int64_t>(part[1], false) : comparison<int32_t>(part[1], false);
    else its.run = wide ? comparison<uint64_t>(part[1], false) : comparison<uint32_t>(part[1], false);
  } else if (first == "mov" && (its.from.size() > 1 || its.to.size() > 1)) {
    its.run = its.from.size() > 1 ? pack : unpack;
    its.option = std::atoi(type.c_str() + 1);
  } else if (first == "shfl") {
    its.run = shuffle;
    its.option = part[2] == "bfly" ? kButterfly : part[2] == "up" ? kUp : part[2] == "down" ? kDown : kIndex;
  } else {
    std::string name = first;
    for (size_t i = 1; i < part.size(); ++i) {
      if (among(part[i], {"rn", "rz", "full", "approx", "uni", "sat", "satfinite", "aligned"})) continue;
      if (part[i] == "ftz" && !among(first, {"ex2", "lg2", "rsqrt", "rcp"})) continue;   // denormals: no kernel has any that matter
      if (first == "ld" && i > 1) break;   // ld.param, whatever its type
      name += "." + part[i];
    }
    if (first == "ld") its.size = std::atoi(type.c_str() + 1) / 8, its.sign = type[0] == 's';
    const auto found = table().find(name);
    its.run = found == table().end() ? nullptr : found->second;
  }
  if (its.run == nullptr) throw Fault("not among the instructions that Triton has made so far: " + its.text);
}

}  // namespace virtual_gpu
