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
  uintptr_t block_space;  // 0 in global memory; else added to the address, for blocks share memory only with themselves
  Path path;
  const void* code;  // the instruction after it
};

// The functions answer what is wrong, if anything is, as a sentence that goes on after the thread's name.
class Races {
 public:
  void forget();  // before a launch
  std::string read(const Touch& touch, const Block& block, const Thread& by);
  std::string write(const Touch& touch, const Block& block, const Thread& by);

  // Several threads may write the same value. So a write that races is judged when it is over.
  std::string settle() { return suspected_.touch.memory ? judge() : std::string(); }

  // What an atomic operation learns from those before it at the same address, and hands on.
  void exchange(const void* address, Thread& by);

 private:
  template <class Check>
  std::string visit(const Touch& touch, const Block& block, const Check& check);
  std::string judge();
  void note_read(Cell& cell, const Access& now, const Block& block, const Thread& by);
  void keep_for_later(Cell& cell, unsigned block);

  Shadow shadow_;
  std::unordered_map<const void*, Knowledge> told_;
  struct {
    Touch touch;  // of no memory, if it isn't suspected
    Access other;
    std::vector<char> before;
  } suspected_ = {};  // the last write
};

}  // namespace emulation
