#include "ptx.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace virtual_gpu {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\n\r"), last = text.find_last_not_of(" \t\n\r");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

// At commas outside of brackets.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    if (c == ',' && depth == 0) parts.push_back(trimmed(part)), part.clear();
    else part += c;
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}

struct Parser {
  Kernel kernel;
  struct Virtual { int bits; bool predicate; int first, last; };   // a register of the text, and where it lives
  std::vector<Virtual> registers;
  std::map<std::string, int> names;
  std::vector<std::map<std::string, std::string>> scopes{{}};
  std::map<std::string, int> widths, labels, parameters;
  std::map<std::pair<uint64_t, int>, int> constants;   // value and bits, to the unit
  std::vector<std::pair<size_t, std::string>> branches;
  int scope = 0;
  int line = 0;

  static int bits_of(const std::string& type) {
    if (type == "pred") return 1;
    const int bits = std::atoi(type.c_str() + type.find_first_of("0123456789"));
    return std::max(bits, 16) == 16 ? 32 : bits;   // narrow ones in a whole unit
  }

  int register_of(const std::string& name) {
    const auto found = names.find(name);
    if (found != names.end()) return found->second;
    const std::string family = name.substr(0, name.find_first_of("0123456789@"));
    const auto exact = widths.find(name);
    const auto width = exact != widths.end() ? exact : widths.find(family);
    if (width == widths.end()) throw Fault("an unknown register: " + name);
    registers.push_back({width->second, width->second == 1, -1, -1});
    return names[name] = int(registers.size()) - 1;
  }

  int constant(uint64_t value, int bits) {
    const auto [found, fresh] = constants.try_emplace({value, bits}, 0);
    if (fresh) {
      std::vector<uint32_t> unit(kLanes * (bits == 64 ? 2 : 1));
      for (int i = 0; i < kLanes; ++i)
        if (bits == 64) std::memcpy(unit.data() + 2 * i, &value, 8);
        else unit[i] = uint32_t(value);
      kernel.constants.insert(kernel.constants.begin(), unit.begin(), unit.end());
      found->second = -int(kernel.constants.size() / kLanes);
    }
    return found->second;
  }

  // `bits`: of the operation, which a constant takes.
  Operand operand(const std::string& text, int bits) {
    Operand result;
    result.bits = uint8_t(bits);
    if (text == "_") {
      result.kind = Operand::kSink;
    } else if (text == "global_smem") {
      result.kind = Operand::kRegister, result.place = constant(0, bits), result.constant = true;
    } else if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') {
      uint64_t value = 0;
      if (text.size() == 10 && text[0] == '0' && (text[1] == 'f' || text[1] == 'F')) {
        value = std::stoull(text.substr(2), nullptr, 16);
      } else if (text.find('.') != std::string::npos) {
        const float number = std::stof(text);
        uint32_t its;
        std::memcpy(&its, &number, 4);
        value = its;
      } else {
        value = text[0] == '-' ? uint64_t(std::stoll(text, nullptr, 0)) : std::stoull(text, nullptr, 0);
      }
      if (bits < 64) value &= (uint64_t(1) << std::max(bits, 1)) - 1;
      result.kind = Operand::kRegister, result.value = int64_t(value), result.constant = true;
      result.place = constant(value, bits == 64 ? 64 : 32);
    } else if (text[0] == '%' && (text.find('.') != std::string::npos || text.compare(0, 5, "%lane") == 0)) {
      widths.emplace(text, 32);
      const bool fresh = names.find(text) == names.end();
      result.kind = Operand::kRegister, result.place = register_of(text);
      if (fresh) kernel.specials.emplace_back(text, result.place);
    } else if (parameters.count(text)) {
      result.kind = Operand::kParameter, result.place = parameters[text];
    } else if (text[0] == '$') {
      result.kind = Operand::kLabel;
    } else {
      result.place = register_of(text);
      result.kind = registers[size_t(result.place)].predicate ? Operand::kPredicate : Operand::kRegister;
      result.bits = uint8_t(registers[size_t(result.place)].bits);
    }
    return result;
  }

  void argument(Instruction& its, const std::string& text, int number, int bits, bool target) {
    std::vector<Operand>& list = target ? its.to : its.from;
    if (number >= 4) number = 3;
    if (text[0] == '{') {
      const auto parts = split(text.substr(1, text.size() - 2));
      its.sizes[number] = int(parts.size());
      for (const auto& part : parts) list.push_back(operand(part, bits));
      return;
    }
    its.sizes[number] = 1;
    if (text[0] != '[') {
      list.push_back(operand(text, bits));
      return;
    }
    const std::string inner = trimmed(text.substr(1, text.size() - 2));
    const size_t plus = inner.find('+');
    const std::string base = trimmed(inner.substr(0, plus));
    Operand address = operand(base, base[0] == '%' ? 64 : 32);
    address.value = plus == std::string::npos ? 0 : std::stoll(trimmed(inner.substr(plus + 1)), nullptr, 0);
    list.push_back(address);
  }

  void declare(const std::string& statement) {   // .reg .b32 %r<5>; or .reg .b32 a, b;
    const size_t dot = statement.find('.', 4), space = statement.find_first_of(" \t", dot);
    const int bits = bits_of(statement.substr(dot + 1, space - dot - 1));
    for (const auto& name : split(statement.substr(space))) {
      const size_t angle = name.find('<');
      if (name[0] == '%') {
        widths[name.substr(0, angle)] = bits;
        continue;
      }
      const int count = angle == std::string::npos ? 0 : std::atoi(name.c_str() + angle + 1);
      for (int i = 0; i < std::max(count, 1); ++i) {
        const std::string plain = angle == std::string::npos ? name : name.substr(0, angle) + std::to_string(i);
        const std::string whole = "%" + plain + "@" + std::to_string(scope);
        widths[whole] = bits;
        scopes.back()[plain] = whole;
      }
    }
  }

  std::string renamed(const std::string& text) {
    if (scopes.size() == 1) return text;
    std::string result, word;
    const auto flush = [&] {
      for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope)
        if (const auto found = scope->find(word); found != scope->end()) {
          word = found->second;
          break;
        }
      result += word, word.clear();
    };
    for (const char c : text)
      if (is_word(c)) word += c;
      else flush(), result += c;
    flush();
    return result;
  }

  void statement(std::string text) {
    if (text.compare(0, 4, ".reg") == 0) return declare(text);
    if (text[0] == '.') return;
    Instruction its;
    its.text = text, its.line = line;
    if (text[0] == '@') {
      const size_t space = text.find_first_of(" \t");
      its.negated = text[1] == '!';
      const std::string guard = renamed(text.substr(its.negated ? 2 : 1, space - (its.negated ? 2 : 1)));
      its.predicate = register_of(guard);
      text = trimmed(text.substr(space));
    }
    const size_t space = text.find_first_of(" \t");
    std::string name = text.substr(0, space);
    for (size_t begin = 0; begin <= name.size();) {
      const size_t dot = std::min(name.find('.', begin), name.size());
      its.name.push_back(name.substr(begin, dot - begin));
      begin = dot + 1;
    }
    const auto& part = its.name;
    const std::string& type = part.back();
    const bool wide = part.size() > 1 && part[1] == "wide";
    int bits = type == "pred" ? 1 : 32;
    if (const size_t digit = type.find_first_of("0123456789"); digit != std::string::npos) bits = std::atoi(type.c_str() + digit);
    if (type == "bf16x2" || type == "f16x2" || type == "e4m3x2") bits = 32;
    const bool has_target = part[0] != "st" && part[0] != "bra" && part[0] != "bar" && part[0] != "stmatrix" && part[0] != "ret" &&
                            part[0] != "cp" && part[0] != "fence" && part[0] != "griddepcontrol" && part[0] != "membar" &&
                            !(part[0] == "wgmma" && part[1] != "mma_async") && part[0] != "prefetch" && part[0] != "trap";
    const auto arguments = split(renamed(space == std::string::npos ? "" : text.substr(space)));
    for (size_t i = 0; i < arguments.size(); ++i) {
      int its_bits = bits;
      if ((part[0] == "shl" || part[0] == "shr" || part[0] == "bfe") && i >= 2) its_bits = 32;
      if (wide && i == 3) its_bits *= 2;
      if ((part[0] == "setp" && i == 0) || (part[0] == "selp" && i == 3)) its_bits = 1;
      if (part[0] == "wgmma" || part[0] == "cp" || part[0] == "bar" || part[0] == "shfl") its_bits = 32;
      if (part[0] == "createpolicy") its_bits = i == 0 ? 64 : 32;
      argument(its, arguments[i], int(i), its_bits, has_target && i == 0);
    }
    if (part[0] == "bra") branches.emplace_back(kernel.code.size(), arguments.at(0));
    kernel.waits |= part[0] == "griddepcontrol" && part[1] == "wait";
    kernel.indirect |= part[0] == "ld" && part[1] == "global" && type == "b64";
    kernel.code.push_back(std::move(its));
  }

  void body(const std::string& text) {
    std::string current;
    bool comment = false;
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if (comment && c != '\n') continue;
      comment = false;
      if (c == '/' && i + 1 < text.size() && text[i + 1] == '/') {
        comment = true;
        continue;
      }
      const std::string so_far = trimmed(current);
      if (c == '{' && so_far.empty()) {
        ++scope, scopes.emplace_back(), current.clear();
      } else if (c == '}' && so_far.empty()) {
        scopes.pop_back(), current.clear();
      } else if (c == ':' && !so_far.empty() && so_far[0] == '$' && (i + 1 == text.size() || text[i + 1] != ':')) {
        labels[so_far] = int(kernel.code.size()), current.clear();
      } else if (c == ';') {
        if (!so_far.empty()) statement(so_far);
        current.clear();
      } else if (c == '\n' && so_far.compare(0, 4, ".loc") == 0) {
        int file = 0;
        std::sscanf(so_far.c_str(), ".loc %d %d", &file, &line), current.clear();
      } else if (c == '\n' && !so_far.empty() && so_far[0] == '.' && so_far.compare(0, 4, ".reg") != 0) {
        current.clear();   // a directive of one line
      } else {
        current += c;
      }
    }
  }

  void head(const std::string& text) {
    for (const auto& each : split(text)) {
      const size_t last = each.find_last_of(" \t"), dot = each.find('.', each.find(".param") + 1);
      const std::string type = each.substr(dot + 1, each.find_first_of(" \t", dot) - dot - 1);
      parameters[each.substr(last + 1)] = int(kernel.parameters.size());
      const int bytes = std::atoi(type.c_str() + type.find_first_of("0123456789")) / 8;
      kernel.parameters.emplace_back(bytes, each.find(".ptr") != std::string::npos);
    }
  }

  // Each access to global memory may touch what the parameters that its address is computed from point to. An address
  // that has been in memory, shared or global, comes from nowhere.
  void trace() {
    if (kernel.parameters.size() > 64) throw Fault(kernel.name + ": more parameters than the machine tells apart");
    std::vector<uint64_t> origins(registers.size());
    const auto holds = [](const Operand& o) { return o.kind == Operand::kRegister && !o.constant && o.bits == 64; };
    const auto of = [&](const Operand& o) {
      return o.kind == Operand::kParameter ? uint64_t(kernel.parameters[size_t(o.place)].second) << o.place : holds(o) ? origins[size_t(o.place)] : 0;
    };
    for (bool changed = true; changed;) {
      changed = false;
      for (const Instruction& its : kernel.code) {
        if (its.to.size() != 1 || !holds(its.to[0]) || (its.name[0] == "ld" && its.name[1] != "param")) continue;
        uint64_t& mine = origins[size_t(its.to[0].place)];
        const uint64_t before = mine;
        for (const Operand& o : its.from) mine |= of(o);
        changed |= mine != before;
      }
    }
    for (Instruction& its : kernel.code) {
      const std::string& name = its.name[0];
      if (name == "ld" || name == "st" || name == "atom" || name == "red") its.origins = of(its.from[0]);
      if (name == "cp" && its.from.size() > 2) its.origins = of(its.from[1]);
    }
  }

  // Where each register is live, as one range of instructions; registers whose ranges do not meet share a place.
  void allocate() {
    const int count = int(kernel.code.size()), words = int(registers.size() + 63) / 64;
    std::vector<std::vector<uint64_t>> live(size_t(count) + 1, std::vector<uint64_t>(size_t(words)));
    std::vector<std::vector<uint64_t>> uses(live.begin(), live.end() - 1), kills = uses;
    const auto add = [&](std::vector<uint64_t>& set, int number) { set[size_t(number) / 64] |= uint64_t(1) << number % 64; };
    const auto counts = [](const Operand& o) { return (o.kind == Operand::kRegister && !o.constant) || o.kind == Operand::kPredicate; };
    for (int i = 0; i < count; ++i) {
      const Instruction& its = kernel.code[size_t(i)];
      const bool accumulates = its.name[0] == "wgmma";
      for (const Operand& o : its.from) if (counts(o)) add(uses[size_t(i)], o.place);
      for (const Operand& o : its.to)
        if (counts(o)) add(its.predicate < 0 && !accumulates ? kills[size_t(i)] : uses[size_t(i)], o.place);
      if (its.predicate >= 0) add(uses[size_t(i)], its.predicate);
    }
    for (bool changed = true; changed;) {
      changed = false;
      for (int i = count; i-- > 0;) {
        const Instruction& its = kernel.code[size_t(i)];
        const bool branch = its.name[0] == "bra", leaves = its.name[0] == "ret" && its.predicate < 0;
        for (int w = 0; w < words; ++w) {
          uint64_t after = leaves || (branch && its.predicate < 0) ? 0 : live[size_t(i) + 1][size_t(w)];
          if (branch) after |= live[size_t(its.from[0].place)][size_t(w)];
          const uint64_t now = uses[size_t(i)][size_t(w)] | (after & ~kills[size_t(i)][size_t(w)]);
          changed |= now != live[size_t(i)][size_t(w)], live[size_t(i)][size_t(w)] = now;
        }
      }
    }
    const auto lives = [&](int number, int at) {
      Virtual& r = registers[size_t(number)];
      r.first = r.first < 0 ? at : std::min(r.first, at), r.last = std::max(r.last, at);
    };
    for (const auto& [name, number] : kernel.specials) lives(number, 0);
    for (int i = 0; i < count; ++i) {
      for (int w = 0; w < words; ++w)
        for (uint64_t left = live[size_t(i)][size_t(w)]; left; left &= left - 1) lives(64 * w + __builtin_ctzll(left), i);
      // What is written is written after all has been read, but an operation may write in pieces.
      for (const Operand& o : kernel.code[size_t(i)].to) if (counts(o)) lives(o.place, i), lives(o.place, std::min(i + 1, count));
    }
    std::vector<int> order, places(registers.size());
    for (size_t i = 0; i < registers.size(); ++i) if (registers[i].first >= 0) order.push_back(int(i));
    std::sort(order.begin(), order.end(), [&](int a, int b) { return registers[size_t(a)].first < registers[size_t(b)].first; });
    std::map<int, std::vector<int>> spare;   // by bits
    std::set<std::pair<int, int>> ends;      // last instruction, register
    for (const int number : order) {
      const Virtual& r = registers[size_t(number)];
      while (!ends.empty() && ends.begin()->first < r.first) {
        const int old = ends.begin()->second;
        spare[registers[size_t(old)].bits].push_back(places[size_t(old)]);
        ends.erase(ends.begin());
      }
      auto& pool = spare[r.bits];
      int& next = r.predicate ? kernel.predicates : kernel.units;
      if (pool.empty()) places[size_t(number)] = next, next += r.bits == 64 ? 2 : 1;
      else places[size_t(number)] = pool.back(), pool.pop_back();
      ends.emplace(r.last, number);
    }
    for (Instruction& its : kernel.code) {
      for (auto* list : {&its.to, &its.from})
        for (Operand& o : *list) if (counts(o)) o.place = places[size_t(o.place)];
      if (its.predicate >= 0) its.predicate = places[size_t(its.predicate)];
    }
    for (auto& [name, place] : kernel.specials) place = places[size_t(place)];
  }
};

}  // namespace

Kernel parse(const std::string& text) {
  Parser parser;
  Kernel& kernel = parser.kernel;
  const std::string entry = ".visible .entry ";
  const size_t begin = text.find(entry), open = text.find('(', begin), close = text.find(')', open);
  const size_t threads = text.find(".reqntid", close), brace = text.find('{', close);
  if (begin == std::string::npos || threads == std::string::npos) throw Fault("this is not a kernel of Triton's: it has no entry");
  kernel.name = text.substr(begin + entry.size(), open - begin - entry.size());
  kernel.threads = std::atoi(text.c_str() + threads + 8);
  parser.head(text.substr(open + 1, close - open - 1));
  size_t end = brace;
  for (int depth = 0; end < text.size(); ++end) {
    depth += (text[end] == '{') - (text[end] == '}');
    if (depth == 0) break;
  }
  parser.body(text.substr(brace + 1, end - brace - 1));
  for (const auto& [at, name] : parser.branches) {
    const auto found = parser.labels.find(name);
    if (found == parser.labels.end()) throw Fault("a branch to nowhere: " + name);
    kernel.code[at].from[0].place = found->second;
  }
  Instruction last;
  last.name = {"ret"}, last.text = "ret";
  kernel.code.push_back(last);
  for (const auto& [at, name] : parser.branches) kernel.code[size_t(kernel.code[at].from[0].place)].label = true;
  parser.trace();
  parser.allocate();
  for (Instruction& its : kernel.code) bind(its);
  return std::move(kernel);
}

}  // namespace virtual_gpu
