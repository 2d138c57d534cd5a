// Finds races: two accesses to the same memory, one of them a write, that nothing orders. That takes no luck: whatever
// order the threads happen to come in, an access is compared with what has been done before it.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "block.h"
#include "shadow.h"

namespace emulation {

enum class Path { through_l1, past_l1, atomic };

struct Touch {
  const void* memory;
  size_t bytes;
  uintptr_t block_space;  // 0 in global memory; in shared memory a number of the block's, added to the address
  Path path;
  const void* code;  // the address of the instruction after it
};

// The functions return what is wrong, as a sentence that goes on after the thread's name, or nothing.
class Races {
 public:
  void forget();  // before a launch
  std::string read(const Touch& touch, const Block& block, const Thread& thread);
  std::string write(const Touch& touch, const Block& block, const Thread& thread);

  // Threads may race to write the same value. So a write that races is suspected, and judged when it is done.
  std::string settle() { return suspected_.touch.memory ? judge() : std::string(); }

  // Lets a thread learn from the earlier atomic operations at an address, and later ones from the thread.
  void exchange(const void* address, Thread& thread);

 private:
  template <class Check>
  std::string visit(const Touch& touch, const Block& block, const Check& check);
  std::string judge();
  void note_read(Cell& cell, const Access& now, const Block& block, const Thread& thread);
  void keep_for_later(Cell& cell, unsigned block);

  Shadow shadow_;
  std::unordered_map<const void*, Knowledge> released_;  // by atomic operations, by address
  struct {
    Touch touch;  // its memory is null if nothing is suspected
    Access other;
    std::vector<char> before;
  } suspected_ = {};  // the last write
};

}  // namespace emulation
