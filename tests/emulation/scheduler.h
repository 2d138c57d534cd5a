// What the emulation's own files ask of the scheduler.
#pragma once

#include "block.h"
#include "races.h"
#include "shared_memory.h"

namespace emulation {

// A block on its multiprocessor.
struct Resident {
  Block block;
  uint3 index;
  bool has_block = false;
};

// The thread that runs on the stack we stand on, and its block; null on the host.
Thread* this_thread();
Block& this_block();

// The block's address space, if its threads share the memory; 0 if it is global.
uintptr_t space_of(const void* memory);
Races& races();
void pause();  // perhaps: other blocks then come first

}  // namespace emulation
