// Who knows what of whom: an access is ordered before all that comes later in the threads which know that it is done.
#pragma once

#include <cstdint>
#include <vector>

namespace emulation {

// A read or a write. Ticks count what orders the accesses of one block: its barriers, meetings of warps and fences.
class Access {
 public:
  enum By : uint64_t { nobody, thread, lanes_of_warp, warps };  // how many: reads are kept together
  Access() = default;
  Access(uint64_t block, uint64_t tick, uint64_t last_thread, By by, bool is_atomic)
      : bits_(block | tick << 24 | last_thread << 51 | by << 61 | uint64_t(is_atomic) << 63) {}
  unsigned block() const { return bits_ & 0xffffff; }
  uint32_t tick() const { return bits_ >> 24 & 0x7ffffff; }
  unsigned last_thread() const { return bits_ >> 51 & 0x3ff; }
  By by() const { return By(bits_ >> 61 & 3); }
  bool is_atomic() const { return bits_ >> 63; }
  Access by(By by) const { return {block(), tick(), last_thread(), by, is_atomic()}; }

 private:
  uint64_t bits_ = 0;  // compilers handle bit fields slowly
};

// Done in a block: what all of its threads did before tick `barrier`, the warp of `thread` before `warp` and `thread`
// itself before `tick`.
struct Known {
  uint32_t block, barrier, warp, tick;
  uint16_t thread;
};

// What is known of blocks, each there at most once.
class Knowledge {
 public:
  bool empty() const { return known_.empty(); }
  void forget() { known_.clear(); }
  void learn(const Known& news);
  void learn(const Knowledge& news);
  bool covers(const Access& access) const;

 private:
  std::vector<Known> known_;  // by block, ascending
};

}  // namespace emulation
