// What threads know of each other's accesses: an access is ordered before all that a thread does after it has learned
// that the access is done.
#pragma once

#include <cstdint>
#include <vector>

namespace emulation {

// A read or a write. Ticks count what orders the accesses of one block: its barriers, meetings of warps and fences.
class Access {
 public:
  enum Doer : uint64_t { nobody, thread, lanes_of_warp, warps };  // one record may stand for several threads' reads
  Access() = default;
  Access(uint64_t block, uint64_t tick, uint64_t last_thread, Doer doer, bool is_atomic)
      : bits_(block | tick << 24 | last_thread << 51 | doer << 61 | uint64_t(is_atomic) << 63) {}
  unsigned block() const { return bits_ & 0xffffff; }
  uint32_t tick() const { return bits_ >> 24 & 0x7ffffff; }
  unsigned last_thread() const { return bits_ >> 51 & 0x3ff; }
  Doer doer() const { return Doer(bits_ >> 61 & 3); }
  bool is_atomic() const { return bits_ >> 63; }
  Access with(Doer doer) const { return {block(), tick(), last_thread(), doer, is_atomic()}; }

 private:
  uint64_t bits_ = 0;  // compilers handle bit fields slowly
};

// What is known to be done in a block: all that its threads did before tick `barrier`, that the warp of `thread` did
// before `warp`, and that `thread` itself did before `tick`.
struct Known {
  uint32_t block, barrier, warp, tick;
  uint16_t thread;
};

// What is known of several blocks.
class Knowledge {
 public:
  bool empty() const { return known_.empty(); }
  void forget() { known_.clear(); }
  void learn(const Known& news);
  void learn(const Knowledge& news);
  bool covers(const Access& access) const;

 private:
  std::vector<Known> known_;  // one at most for each block, ascending
};

}  // namespace emulation
