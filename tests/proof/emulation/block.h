// The threads of one block, and which of them wait for which.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "emulation/scheduler.h"
#include "fiber.h"
#include "knowledge.h"

namespace emulation {

enum class State { ready, in_block_barrier, in_warp_meeting, exited };

struct Thread {
  explicit Thread(void (*body)()) : fiber(body) {}

  Fiber fiber;
  State state;
  unsigned number;  // within the block
  uint3 index;

  // What the thread waits in, and what it brought there.
  const char* name;
  Place place;
  unsigned mask, source;
  uint64_t value;
  Meeting kind;

  // What the thread gets there.
  uint64_t met;
  int count;

  // The ticks of the thread's last meeting, and of its last meeting that ordered memory.
  uint32_t met_at, synced_at;
  // What the thread knows of other blocks beyond what its block knows; what it will know after its next fence; and what
  // its last fence lets other threads know through an atomic.
  Knowledge known, acquired, released;
};

class Block {
 public:
  void start(unsigned number, dim3 size, void (*body)());
  void forget() { threads_.clear(); }  // after a failure: threads stopped half-way cannot start again

  unsigned size() const { return size_; }
  Thread& operator[](unsigned number) { return *threads_[number]; }

  bool exited() const;                   // whether every thread has
  void finish_meetings(unsigned first);  // those of the warp that begins with thread `first`
  std::string finish_barrier();          // answers why not, if not every thread stands in it
  void fence(Thread& t);

  // Whether an earlier read or write is ordered before what `t` does now. That takes more for a write: when two lanes
  // have met, each knows that the other's reads are done, but need not see the other's writes.
  bool has_done(const Access& before, bool is_write, const Thread& t) const {
    return before.doer() == Access::nobody || (before.tick() < barrier_ && before.block() == number_) ||
           has_done_since(before, is_write, t);
  }
  unsigned number() const { return number_; }
  uint32_t tick() const { return tick_; }
  uint32_t barrier() const { return barrier_; }

 private:
  Thread* lane_of_warp(const Thread& t, unsigned lane) const;
  unsigned missing_lane(const Thread& t) const;
  void release_meeting(const Thread& t);
  bool has_done_since(const Access& before, bool is_write, const Thread& t) const;

  std::vector<std::unique_ptr<Thread>> threads_;  // as many as the largest block so far had
  unsigned size_ = 0, number_ = 0;
  uint32_t tick_ = 0, barrier_ = 0;  // now, and at the last barrier
  Knowledge known_;                  // what all threads know
};

std::string text(const uint3& index);

}  // namespace emulation
