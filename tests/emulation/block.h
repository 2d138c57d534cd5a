// The threads of one block, and who of them waits for whom.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "emulation/scheduler.h"
#include "fiber.h"

namespace emulation {

enum class State { ready, in_block_barrier, in_warp_meeting, exited };

struct Thread {
  explicit Thread(void (*body)()) : fiber(body) {}

  Fiber fiber;
  State state;
  unsigned number;  // within the block
  uint3 index;

  // What it waits in, and what it brought there.
  const char* name;
  Place place;
  unsigned mask, source;
  uint64_t value;
  Exited exited;

  // What it gets.
  Met met;
  int count;
};

class Block {
 public:
  void start(dim3 size, void (*body)());
  void forget() { threads_.clear(); }  // after a failure: threads stopped half-way cannot start again

  unsigned size() const { return size_; }
  Thread& operator[](unsigned number) { return *threads_[number]; }

  bool exited() const;                   // every thread has
  void finish_meetings(unsigned first);  // those of the warp that begins with thread `first`
  std::string finish_barrier();          // answers why not, if not every thread stands in it

 private:
  Thread* lane_of_warp(const Thread& t, unsigned lane) const;
  unsigned missing_lane(const Thread& t) const;
  void release_meeting(const Thread& t);

  std::vector<std::unique_ptr<Thread>> threads_;  // as many as the largest block so far had
  unsigned size_ = 0;
};

std::string text(const uint3& index);

}  // namespace emulation
