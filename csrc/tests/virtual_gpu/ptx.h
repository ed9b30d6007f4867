// PTX text, parsed: a kernel's parameters and instructions, with registers in few slots. The other files execute it.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace virtual_gpu {

// What is wrong with a kernel or with what it did: one line.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kLanes = 32;

// A register's or a constant's place: in units of 32 lanes of 4 bytes. Constants count down from -1. 64-bit ones take two
// units; 16- and 8-bit ones one, zero-extended. A predicate is one word of 32 bits in an array of its own.
struct Operand {
  enum Kind : uint8_t { kNone, kRegister, kPredicate, kParameter, kLabel, kSink } kind = kNone;
  uint8_t bits = 32;
  int place = 0;        // of a parameter: its number; of a label: the instruction
  int64_t value = 0;    // of a constant; of an address: what is added
  bool constant = false;
};

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

// Who executes an instruction, and what comes next.
enum class Flow : uint8_t {
  kPlain,      // the lanes that are there
  kTurn,       // they, and then other warps may have a turn
  kTogether,   // all lanes of the warp
  kBarrier, kWait, kTrigger,   // likewise: of the CTA; for the grid ahead; dependents may begin
  kBranch, kReturn,
};

struct Instruction {
  Handler run = nullptr;
  std::vector<Operand> to, from;   // lists of operands are flattened: operations know how many there are
  int sizes[4] = {0, 0, 0, 0};     // how many operands each argument had, in order
  int predicate = -1;              // place of the guard
  bool negated = false;
  bool label = false;              // does anything branch here?
  Flow flow = Flow::kPlain;
  int size = 0, count = 1;         // of a memory access: bytes of an element, elements
  bool sign = false;               // a load extends it
  int option = 0;                  // what the operation makes of it: a comparison, a mode, ...
  std::vector<std::string> name;   // parts between dots
  std::string text;
  int line = 0;                    // of the source that Triton was given
  uint64_t origins = 0;            // of an access to global memory: parameters that its address comes from, bits; 0: unknown
};

struct Kernel {
  std::string name;
  std::vector<std::pair<int, bool>> parameters;   // bytes, whether it is a pointer
  std::vector<Instruction> code;
  std::vector<uint32_t> constants;                // kLanes words a unit, the last unit first
  std::vector<std::pair<std::string, int>> specials;   // special registers and their places, filled when a warp begins
  int units = 0, predicates = 0, threads = 0;
  bool waits = false;      // for the kernel ahead
  bool indirect = false;   // does it load addresses?
};

// Throws Fault. `text`: of one kernel, as Triton emits it.
Kernel parse(const std::string& text);

// The operation of an instruction; sets its size, count, option and flow. Throws Fault where there is none. (operations.cpp)
void bind(Instruction& instruction);

}  // namespace virtual_gpu
