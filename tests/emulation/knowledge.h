// Who knows what of whom: an access is ordered before all that comes later in the threads which know that it is done.
#pragma once

#include <cstdint>
#include <vector>

namespace emulation {

// A read or a write. Ticks count what orders the accesses of one block: its barriers, meetings of warps and fences.
struct Access {
  enum class By : uint8_t { nobody, thread, lanes_of_warp, warps };  // how many: reads are kept together
  uint64_t block : 24, tick : 27, thread : 10;                        // the last one's
  By by : 2;
  bool is_atomic : 1;
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
