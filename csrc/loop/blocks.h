// The KV cache of many texts: blocks of kSpan positions out of a fixed budget. Texts that begin alike share them.
//
// A block whose positions are all verified rows is never written to again. It is known by its tokens and by what stands
// before it, stays when nobody holds it any more, and is forgotten when its memory is needed: the least recently used first.
// Where two texts part in the middle of a block, the later one copies it.
#pragma once

#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "../cpu/layers.h"
#include "../cpu/memory.h"

namespace ppsd {

class Blocks {
 public:
  Blocks(size_t block_bytes, int count);   // throws std::bad_alloc

  int count() const { return int(states_.size()); }
  int available() const { return int(unused_.size() + idle_.size()); }   // that nobody holds
  size_t block_bytes() const { return bytes_; }
  uint8_t* at(int block) const { return memory_.as<>() + size_t(block) * bytes_; }

  std::optional<int> take();   // one to write to; nullopt: all are held
  void hold(int block);     // too: whoever does releases it
  void release(int block);
  void wipe(int block);        // zeros: what it held must not be met again
  void copy(int from, int to);

  // Where other ranks hold the same blocks of other layers: what they have to do too, since they were last told.
  struct Changes {
    std::vector<int> wiped;
    std::vector<std::pair<int, int>> copies;   // {from, to}
  };
  void note_changes() { notes_ = true; }
  Changes take_changes() { return std::exchange(changes_, {}); }

  // What a whole block holds: kSpan tokens after `before` (of the block before; 0: the text begins here). Never given twice.
  using Content = uint64_t;
  struct Shared {
    int block;
    Content content;
  };
  // saved: may it go to a file? Once it may, it may.
  std::optional<Shared> share(Content before, const int* ids, bool saved = true);   // holds it
  // `block` holds this from now on. If another one does, that is held instead, and this one released. count: fewer than kSpan
  // where the text ends: then nobody shares it, but later texts may copy it.
  Shared keep(int block, Content before, const int* ids, int count = kSpan, bool saved = true);
  // The block that begins, after `before`, with the most of these ids, at most `most`; and how many. Nobody need hold it.
  std::pair<int, int> like(Content before, const int* ids, int most) const;

  // What blocks hold that may be saved, outside of this process: the most recently used first, at most `most`
  // of them, from a place in a file on. Returns how many. Throws std::system_error.
  int write(int file, int64_t at, int most) const;
  // So many of them into blocks that are free. One that is damaged, or stands after such a one, is as if it were not there.
  // Returns how many are here now.
  int read(int file, int64_t at, int count);

 private:
  using Key = std::pair<Content, std::vector<int>>;
  struct State {
    int holders = 0;
    Content content = 0;   // 0: nothing that could be shared
    bool saved = false;
    Key key;
    std::list<int>::iterator place;   // in idle_
  };

  const size_t bytes_;
  Memory memory_;
  std::vector<State> states_;
  std::vector<int> unused_;
  std::list<int> idle_;   // held by nobody, content kept: the least recently used first
  std::map<Key, int> index_;
  Content last_content_ = 0;
  bool notes_ = false;
  Changes changes_;
};

// The blocks of one text.
class BlockTable {
 public:
  // kind: texts of different ones share nothing. saved: its blocks may go to a file.
  explicit BlockTable(Blocks* blocks, int kind = 0, bool saved = true)
      : blocks_(blocks), saved_(saved), root_(kind == 0 ? 0 : ~Blocks::Content(0) - Blocks::Content(kind)), content_(root_) {}
  ~BlockTable() { drop(); }
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // Takes whole blocks that hold the rows of `ids` after those that are here, up to row `most`. The table's rows must all be
  // in whole blocks that are kept. Returns how many rows are here then.
  int share(const std::vector<int>& ids, int most);
  // Copies rows after those, of a block that goes on like the text for a while. Returns how many rows are here then.
  int copy_rest(const std::vector<int>& ids, int most);
  bool reserve(int rows);   // false: there are not so many blocks; what could be had is here
  void keep(const std::vector<int>& ids, int rows);   // the rows [0, rows) of these ids are verified
  void leave(const std::vector<int>& ids, int rows);  // the same, and it drops them: the last ones are for others to copy
  void drop();
  void wipe();              // drops them, and what is not shared is zeros

  uint8_t* const* pointers() const { return pointers_.data(); }
  const std::vector<int>& numbers() const { return held_; }
  int size() const { return int(held_.size()); }

 private:
  void add(int block);

  Blocks* blocks_;
  const bool saved_;
  const Blocks::Content root_;     // what stands before the text
  std::vector<int> held_;
  std::vector<uint8_t*> pointers_;
  int kept_ = 0;                   // the first so many can be shared
  Blocks::Content content_;        // of the last of these
};

// Blocks of one text that has them for itself, the first one first.
class TextBlocks {
 public:
  TextBlocks(size_t block_bytes, int rows) : blocks_(block_bytes, (rows + kSpan - 1) / kSpan) {
    for (int block = 0; block < blocks_.count(); ++block) table_.push_back(blocks_.at(block));
  }
  Blocks& blocks() { return blocks_; }
  int rows() const { return blocks_.count() * kSpan; }
  Segment segment(int start, int rows, int prompt = 0) const { return {rows, start, table_.data(), int(table_.size()), prompt}; }
  void fill() {   // with made-up numbers: to measure what is read from memory that is really there
    std::memset(blocks_.at(0), 0x3C, size_t(blocks_.count()) * blocks_.block_bytes());   // 0.0115 in any format
  }

 private:
  Blocks blocks_;
  std::vector<uint8_t*> table_;
};

}  // namespace ppsd
