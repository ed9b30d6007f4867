// A pass of the loop on its way over the ranks, and what comes back from the last one.
//
// Rank 0 decides everything: which answers have rows, and in which blocks their KV caches lie. A block has the same number on
// every rank, so a pass brings the block tables along, and stages keep nothing of an answer but its sampler, which the last
// one has. Passes arrive in the order in which they were sent, so that a block may be given away while rows of its former
// owner are still under way: they are written before those of the next one.
//
// An answer may have rows in several passes that are under way. When a verdict rejects a draft, the rows behind it are void: a
// part of a later epoch says so to every stage that it comes to (stage_inbox.h). They go on as a part without rows, or do
// harm to nobody, since the rows of the new epoch are written over them.
//
// In one process stages have threads instead (stage_threads.h). They are handed the same passes, and all stages' layers lie in the
// loop's own blocks. So the loop itself wipes and copies these, and answers bring their samplers along.
//
// An EAGLE-3 head reads what rows are after some of the layers, at its taps. Stages know where these are, and a row brings along
// those that it has passed; the verdict takes them home, of every row.
//
// On the wire both are int32 words in the byte order of the hosts: a header of kWireIds, tables, and rows (pass.cpp).
#pragma once

#include <cstdint>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../core/schedule.h"
#include "../cpu/sampler.h"

namespace ppsd {

constexpr int kWireVersion = 13;
constexpr int kWireIds = 16;        // words of the header
constexpr int kMostLogprobs = 20;   // the most probable ids that are reported for a token

// Now, as the header of a message says it (links.py); comparable between processes of one host.
inline int64_t wire_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Consecutive rows of an answer, at positions [start, start + rows).
struct PassPart {
  int32_t answer = 0;          // its number
  int32_t epoch = 0;           // raised at every rejection
  int32_t start = 0, rows = 0; // no rows: they were void, and a stage has dropped them
  int32_t chooses = 0;         // how many of the rows choose a token, the last ones
  int32_t known = 0;           // ids: of the text's positions [known, start + rows); the sampler knows those before
  std::vector<int32_t> ids;
  std::vector<int32_t> blocks;
};

// What stages are told of an answer that begins.
struct Settings {
  int32_t end = 0;       // positions that the answer may have
  int32_t grammar = 0;   // the number of its grammar, which the last rank has been told of; 0: it has none
  Sampling sampling;
};

struct PassMessage {
  uint64_t number = 0;
  std::vector<std::pair<int32_t, int32_t>> copies;   // of whole blocks, before anything is computed: {from, to}
  std::vector<int32_t> wiped;                        // blocks that become zeros, before that
  struct Opened {
    int32_t answer;
    Settings settings;
    std::shared_ptr<Sampler> sampler;   // its own, in one process; or null
  };
  std::vector<Opened> opened;                        // answers that have rows from now on,
  std::vector<int32_t> closed;                       // and those that have none any more
  std::vector<PassPart> parts;
  bool wants_hidden = false;                         // the verdict is to carry hidden states home, for the exit head
  bool traced = false;                               // every rank records a timeline of the answers that begin with it
  int limit = 0;                                     // rows of an only part, up to which the passes after it may join it
  std::vector<float> hidden;   // [rows][hidden]: what the stage before made of them
  std::vector<float> tapped;   // [rows][taps][hidden]: of the stages before, in the head's order

  int rows() const;
  void drop(const std::function<bool(const PassPart&)>& is_void);   // the rows of such parts
  void join(const PassMessage& next);   // whose rows follow those of the only part here
};

// What the rows of a pass that choose have chosen, part by part.
struct PassVerdict {
  struct Failure {
    int32_t part = 0;
    int32_t grammar = 0;       // 1: a grammar gives up; 0: it is a number that is none
    std::string why;
  };
  uint64_t number = 0;              // of the pass, or of the last one of several that have become one
  std::vector<int32_t> dropped;     // parts whose rows were void
  std::vector<int32_t> chosen;
  std::vector<Logprobs> logprobs;   // [chosen], of parts that ask for none empty; or none at all
  std::vector<float> hidden;        // [chosen][hidden], where the exit head asks for it; or none
  std::vector<float> tapped;        // [rows][taps][hidden], of all that were not dropped; or none
  std::vector<Failure> failures;
  std::chrono::steady_clock::time_point begun, ended;   // in one process: when the last stage worked on it
};

// Room for any pass, and for any verdict on one. Its tables may have kPassTables words in all: of a text of a million tokens
// these are the ids that the last rank does not know, and where the blocks are.
constexpr size_t kPassTables = size_t(1) << 20;
inline size_t most_pass_words(int hidden, int taps = 0) {
  return kWireIds + kPassTables + size_t(kPassRows) * size_t(hidden) * size_t(1 + taps);
}

// They write into out[most_pass_words] and return how many words it has become.
size_t write_pass(const PassMessage& pass, int32_t* out);
size_t write_verdict(const PassVerdict& verdict, int32_t* out);
// `words`: as many as the buffer has. taps: that rows bring along. Throw std::runtime_error for what does not follow the protocol.
PassMessage read_pass(const int32_t* message, size_t words, int hidden, int taps);
PassVerdict read_verdict(const int32_t* message, size_t words, int hidden, int taps);

}  // namespace ppsd
