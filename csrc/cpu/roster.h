// How many members of a team work. A thread that has lost its core to another program keeps all others waiting, at every
// barrier, for milliseconds: with one busy program beside them two threads decode slower than one.
#pragma once

namespace ppsd {

class Roster {
 public:
  // `pinnable`: the members have cores of their own for as long as all goes well.
  Roster(int size, bool pinnable) : size_(size), highest_(size + (pinnable ? 1 : 0)), level_(highest_) {}

  int active() const { return level_ < size_ ? level_ : size_; }
  bool pinned() const { return level_ > size_; }

  // After a pass that took so many seconds, of which its members together slept so many at barriers. True: active() or
  // pinned() has changed.
  bool after(double seconds, double slept);

 private:
  bool move(int by);

  const int size_, highest_;
  int level_;             // members at work; above size_: all of them, pinned
  double excess_ = 0.0;   // seconds slept beyond what is bearable
  double here_ = 0.0;     // seconds of passes at this level
  double patience_ = 0.0; // seconds after which the next level is tried
  bool tried_ = false;    // this level was, and is not proven yet
};

}  // namespace ppsd
