// The CPU kernels, one table of them for each instruction set; `kernels/table.h` is the one source of all.
//
// All are row-invariant: the bits of a row depend on that row alone, not on the number of rows, on the parts that the
// work is cut into, or on the number of threads. Along K every output is one chain of additions in a fixed order;
// attention goes through blocks of absolute positions.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

// For what the kernels' files call of this header: an out-of-line copy, compiled for one machine, is not kept apart from
// those of other files, and the linker might give it to all.
#define PPSD_INLINE [[gnu::always_inline]] inline

namespace ppsd {

enum class Format { kFp32, kBf16, kInt8, kInt6, kInt4 };   // of weights; and, the first three, of the activations that meet them
enum class Stored { kFp32, kFp16, kBf16, kInt8 };   // of a checkpoint's tensors, and of the KV cache (fp32, bf16, int8)

constexpr int kPanel = 16;    // outputs that are computed together: the lanes of a register
constexpr int kBlock = 32;    // inputs that share a scale in int8 and int4
constexpr int kSpan = 64;     // positions of an attention block
constexpr int kMostHeadDim = 256;   // that an int8 KV cache takes, and norms of heads
constexpr int kAttendTogether = 6;   // queries (rows and heads) of one KV head for which its rows are read once

// What rows of activations are made, to meet weights of a format.
PPSD_INLINE constexpr Format activations_of(Format weights) { return weights > Format::kInt8 ? Format::kInt8 : weights; }

constexpr int kInt4Minima = kPanel * 2, kInt4Codes = kPanel * 4;   // of a block of int4, where these begin
constexpr int kInt4Block = kInt4Codes + kBlock * kPanel / 2;       // its bytes

constexpr int kSixes = 16, kInt6Inputs = 256;                       // inputs that share a scale in int6, and those of a block
constexpr int kInt6Scales = kPanel * 4, kInt6Codes = kInt6Scales + kInt6Inputs / kSixes * kPanel;   // where these begin
constexpr int kSixesBytes = kSixes * kPanel * 6 / 8, kInt6Block = kInt6Codes + kInt6Inputs / kSixes * kSixesBytes;

// A packed matrix [outputs, inputs]: panels of 16 outputs, each one contiguous stretch of memory.
//   fp32: [inputs][16] float
//   bf16: [inputs / 2][16][2] bfloat16
//   int8: [inputs / 32][16] fp16 scales, then [inputs / 32][8][16][4] int8
//   int4: [inputs / 32] blocks of [16] fp16 scales, [16] fp16 minima and [4][16][4] bytes: input i of a block in the low
//         half, i + 16 in the high one. A weight is scale * code - minimum, codes are 0 to 15.
//   int6: [inputs / 256] blocks of [16] fp16 scales and as many bytes of nothing, [16][16] int8 scales of 16 inputs each, and for
//         each 16 inputs [3][16][4] bytes: the low four bits of inputs 0-3 and, in the high half, 4-7; those of 8-11 and 12-15;
//         the high two bits of all, 0-3 lowest. A weight is scale * int8 scale * (code - 32), codes are 0 to 63.
struct Matrix {
  Format format = Format::kFp32;
  int outputs = 0, inputs = 0;
  uint8_t* data = nullptr;
  int wide_from = INT_MAX;   // int6, int4: the panels from here on are int8

  PPSD_INLINE int panels() const { return (outputs + kPanel - 1) / kPanel; }
  PPSD_INLINE Format format_of(int panel) const { return panel < wide_from ? format : Format::kInt8; }
  PPSD_INLINE size_t panel_bytes(Format format) const {
    const size_t n = size_t(inputs);
    switch (format) {
      case Format::kFp32: return n * kPanel * 4;
      case Format::kBf16: return n * kPanel * 2;
      case Format::kInt8: return scale_bytes() + n * kPanel;
      case Format::kInt6: return n / kInt6Inputs * kInt6Block;
      case Format::kInt4: return n / kBlock * kInt4Block;
    }
    return 0;
  }
  PPSD_INLINE size_t scale_bytes() const { return (size_t(inputs) / kBlock * kPanel * 2 + 63) / 64 * 64; }
  size_t bytes() const { return offset(panels()); }
  PPSD_INLINE size_t offset(int p) const {
    const size_t wide = size_t(std::max(p - wide_from, 0));
    return panel_bytes(format) * (size_t(p) - wide) + (wide > 0 ? panel_bytes(Format::kInt8) * wide : 0);
  }
  PPSD_INLINE uint8_t* panel(int p) const { return data + offset(p); }
};

constexpr int kPassRows = 64;   // the most rows that share a pass over the weights

struct Kernels;

// Rows of activations in the format that the weights want, in words of four bytes (one float, two bfloat16 or four int8;
// of bfloat16 one, as a float, where the kernels have no instruction for pairs). As many rows as a micro-kernel takes lie side
// by side, so that it finds those of one word beside each other and reads nothing else: [groups of rows][words][rows of it].
// Or block by block, [width / 32][rows][words of a block]: `by_block` of the kernels says when.
struct Activations {
  Format format = Format::kFp32;   // never kInt6 or kInt4
  int width = 0, rows = 0;
  int together = 1;                // rows of a group; all of them if by_block
  bool by_block = false;
  uint32_t* words = nullptr;
  // int8, [groups][width / 32][rows of the group]:
  float* scales = nullptr;
  int32_t* corrections = nullptr;  // what unsigned weights add too much
  float* minus_sums = nullptr;     // minus scale times the sum of the values: what minima are times
  int32_t* starts = nullptr;       // twice as many, of 16 values each: what sums of int6's codes begin with, see Simd::start_of

  // Of `each` values that every row has, where the first one of row r is, and how far it is to the next.
  struct Place {
    size_t at;
    int step;
  };
  PPSD_INLINE Place place(int r, int each) const {
    const int first = r - r % together;
    return {size_t(first) * each + (r - first), std::min(together, rows - first)};
  }

  // int8: the value of an input of a row.
  PPSD_INLINE float value(int row, int input) const {
    const int word = input / 4, in_block = kBlock / 4, block = input / kBlock;
    const Place words_at = place(row, width / 4), scales_at = place(row, width / kBlock);
    const size_t at =
        by_block ? (size_t(block) * rows + row) * in_block + word % in_block : words_at.at + size_t(word) * words_at.step;
    return float(reinterpret_cast<const int8_t*>(words + at)[input % 4]) * scales[scales_at.at + size_t(block) * scales_at.step];
  }

  // For weights of this format.
  static size_t bytes(const Kernels& kernels, Format weights, int rows, int width);
  static Activations at(const Kernels& kernels, uint8_t* memory, Format weights, int rows, int width);
};

// One row of a checkpoint's tensor; a null row packs as zeros.
struct SourceRow {
  const void* data = nullptr;
};

// What becomes a Matrix: a row for each output, and how much an error in the weights of each input matters (null: all alike).
struct Source {
  const SourceRow* rows;
  Stored stored;
  const float* importance;   // [inputs]; int4 looks at it
};

struct KvCache {
  Stored stored = Stored::kFp32;
  int kv_heads = 0, head_dim = 0, capacity = 0;   // capacity: a multiple of kSpan
  uint8_t* keys = nullptr;     // [kv heads][capacity / 16][head_dim][16]: channels in rotary order, see rope_channel
  uint8_t* values = nullptr;   // [kv heads][capacity][head_dim]
  // int8: keys [kv heads][capacity / 16] panels of [head_dim / 4][16][4] int8 and [head_dim / 32][16] float scales;
  //       values the same panels of [4][head_dim][4] int8 (four positions side by side) and the same scales
  // Or in blocks of kSpan positions, wherever these lie: each holds the same for its positions (so capacity is kSpan), the
  // keys from `keys_at` on, the values from `values_at` on.
  uint8_t* const* blocks = nullptr;
  size_t keys_at = 0, values_at = 0;

  // The cache whose position 0 is the first of a span; good for that span alone.
  PPSD_INLINE KvCache of_span(int span) const {
    KvCache part = *this;
    if (blocks != nullptr) {
      part.keys = blocks[span] + keys_at;
      part.values = blocks[span] + values_at;
    } else {
      const size_t one = bytes(stored, 1, head_dim, kSpan);
      part.keys += span * one;
      part.values += span * one;
    }
    return part;
  }

  PPSD_INLINE static size_t bytes(Stored stored, int kv_heads, int head_dim, int capacity) {   // of keys, and of values
    if (stored == Stored::kInt8) return size_t(kv_heads) * (capacity * panel_bytes(head_dim) / kPanel);
    return size_t(kv_heads) * capacity * head_dim * (stored == Stored::kFp32 ? 4 : 2);
  }
  // Which heads may be kept so: blocks are of 32 channels, and a query's are kept on the stack.
  static bool takes_int8(int head_dim) { return head_dim % kBlock == 0 && head_dim <= kMostHeadDim; }

  // int8: 16 positions of a head.
  PPSD_INLINE static size_t panel_bytes(int head_dim) { return size_t(kPanel) * (head_dim + head_dim / kBlock * 4); }
  PPSD_INLINE uint8_t* panel(uint8_t* of, int head, int position) const {
    return of + (size_t(head) * (capacity / kPanel) + position / kPanel) * panel_bytes(head_dim);
  }
};

// Channel c of a head as the kernels order it: each panel of 16 holds 8 channels and their 8 rotary partners.
inline int rope_channel(int c, int head_dim) {
  const int panel = c / kPanel, lane = c % kPanel;
  return panel * 8 + lane % 8 + (lane < 8 ? 0 : head_dim / 2);
}

// What a member of a team reads of the weights after the phase at hand: two stretches of memory, one after the other.
// Attention asks for them, for it computes much and reads little. `begin` moves on.
struct ReadAhead {
  const uint8_t *begin = nullptr, *end = nullptr, *then_begin = nullptr, *then_end = nullptr;
};

// What a member reads when it has read the panels of its own stretch, up to `end`: asked for with the last of them.
struct ReadThen {
  int end = -1;
  const uint8_t* then = nullptr;
};

// RMSNorms of every head of the queries and of the keys, [head_dim] in rotary order; null: there are none. A part of the work
// is then of whole heads.
struct HeadNorms {
  const float *queries = nullptr, *keys = nullptr;
  float eps = 0.0f;
};

struct QkvPhase {
  const Matrix* weights;         // rows: q heads, k heads (both in rotary order), v heads
  const float* bias;             // [outputs] in the same order, or null
  const Activations* input;
  int rows, start;               // positions [start, start + rows)
  int heads;
  const float* rope;             // [capacity][head_dim][2]: cosine, signed sine, in rotary order; null: nothing is rotated
  float* queries;                // [rows][heads][head_dim], scaled by 1 / sqrt(head_dim)
  const KvCache* cache;
  const int* positions;          // null; or that of every row, each of which then has a cache of its own: cache[row]
  ReadThen next{};
  HeadNorms norms{};
};

struct AttendPhase {
  const float* queries;          // [rows][heads][head_dim]
  const KvCache* cache;
  int rows, start, heads;
  float* mixed;                  // [rows][heads][head_dim]
  ReadAhead* ahead = nullptr;    // this member's
  int window = 0;                // positions that a row sees, its own included; 0: all before it

  // A unit of work: some of the queries that read one KV head, row by row.
  PPSD_INLINE int group() const { return heads / cache->kv_heads; }
  PPSD_INLINE int parts() const { return (rows * group() + kAttendTogether - 1) / kAttendTogether; }
  PPSD_INLINE int units() const { return cache->kv_heads * parts(); }
};

struct AddPhase {                // x += input W^T (+ bias)
  const Matrix* weights;
  const float* bias;
  const Activations* input;
  int rows;
  float* x;                      // [rows][outputs]
  ReadThen next{};
};

struct SwigluPhase {             // output = silu(gate) * up; panels of the matrix: gate 0, up 0, gate 1, up 1, ...
  const Matrix* weights;
  const float* bias;             // [outputs] in the same order, or null
  const Activations* input;
  int rows;
  const Activations* output;     // width: outputs / 2
  ReadThen next{};
};

// How the LM head's results are used. Ids: index of the output, or draft_ids[index].
enum class Choice {
  kStore,     // all logits, for filters that need them, and for tests
  kBest,      // running arg-max of penalised logits / T + noise
  kTop,       // the top_k largest penalised logits
};

struct Candidate {
  float score;
  int id;
  bool operator<(const Candidate& other) const {   // better first; equal scores by lowest id
    return score > other.score || (score == other.score && id < other.id);
  }
};

constexpr Candidate kNoCandidate{-std::numeric_limits<float>::infinity(), std::numeric_limits<int>::max()};

// Into a heap of the `most` best, whose front is the worst of them. (Not in the kernels' files: what the compiler makes of
// a standard container there may be for another machine, and the linker keeps only one copy.)
void keep_best(std::vector<Candidate>* top, int most, const Candidate& candidate);

struct RowChoice {
  float inverse_temperature;
  uint64_t seed;
};

struct LogitsPhase {
  const Matrix* weights;
  const Activations* input;
  int rows;
  const int* positions;          // [rows]: those that the rows choose tokens for
  const RowChoice* each;         // null; or what differs from row to row (kBest, no penalty)
  Choice choice;
  const int* draft_ids;          // or null
  // penalty: ids seen before a row's position; first_seen[id] is the first position that holds the id
  float repetition_penalty;
  const int* first_seen;         // [vocabulary], or null when the penalty is 1
  float inverse_temperature;     // kBest: 0 is greedy (no noise); else noise is added
  uint64_t seed;
  int top_k;
  float* logits;                 // kStore: [rows], `stride` apart
  int stride;
  Candidate* best;               // kBest: [rows], this thread's
  std::vector<Candidate>* top;   // kTop: [rows], this thread's; capacity is kept
  uint8_t* strange;              // [rows], this thread's: 1 where one of the logits is NaN or infinite
};

struct Kernels {
  const char* name;
  int weight_offset;             // added to integer weights
  int bf16_words;                // that two activations in bfloat16 take
  int rows;                      // of a micro-kernel
  bool (*by_block)(Format weights, int rows, int width);   // how activations are to lie
  // Panels [begin, end) of `out`. False: one of the weights is no finite number.
  bool (*pack)(const Matrix& out, const Source& source, int begin, int end);
  // One output of `out`. row: [inputs], or null: zeros. importance: as of Source. False: likewise.
  bool (*pack_output)(const Matrix& out, const void* row, Stored stored, const float* importance, int output);
  void (*unpack)(const Matrix& in, int output, float* row);
  // RMSNorm of x [rows][width], times weight, in the activations' format.
  void (*normalize)(const float* x, int rows, const float* weight, float eps, const Activations& out);
  void (*convert)(const float* x, int rows, const Activations& out);
  void (*qkv)(const QkvPhase&, int panel_begin, int panel_end);
  void (*attend)(const AttendPhase&, int unit_begin, int unit_end);
  void (*add)(const AddPhase&, int panel_begin, int panel_end);
  void (*swiglu)(const SwigluPhase&, int unit_begin, int unit_end);      // units of 32 outputs: four panels
  void (*logits)(const LogitsPhase&, int panel_begin, int panel_end);
  // max of x [n], and sum of exp((x - max) * scale)
  void (*soft_sum)(const float* x, int n, float scale, float* max, float* sum);
  // Gumbel noise of `ids` [n] at a position
  void (*gumbel)(uint64_t seed, int position, const int* ids, int n, float* out);
  // The best of scores [n] over the temperature, with noise, of ids [n] (null: 0, 1, ..); kNoCandidate where none is a number.
  Candidate (*choose)(const float* scores, const int* ids, int n, float inverse_temperature, uint64_t seed, int position);
  // Reads [data, data + bytes), bytes a multiple of 1024: the machine's own speed, to measure the others by.
  uint64_t (*stream)(const uint8_t* data, size_t bytes);
};

const Kernels& amx_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512vnni_kernels();
const Kernels& avxvnni_kernels();
const Kernels& avx2_kernels();
const Kernels& dotprod_kernels();
const Kernels& neon_kernels();
const Kernels& portable_kernels();

// The best table for this machine, or the one that PPSD_ISA names. Throws std::runtime_error, one line.
const Kernels& pick_kernels();
std::vector<const Kernels*> usable_kernels();
std::vector<std::string> built_kernels();

}  // namespace ppsd
