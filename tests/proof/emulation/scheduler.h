// What the emulation's own files ask of the scheduler.
#pragma once

#include "block.h"
#include "races.h"
#include "shared_memory.h"

namespace emulation {

// A place on a multiprocessor, and the block that it has.
struct Resident {
  Block block;
  uint3 index;
  bool has_block = false;
};

extern Resident* resident;  // whose turn it is
extern Thread* running;     // null on the host
extern Races races;

// The thread on whose stack we stand: while a kernel runs, another thread of the host may be in the same code.
inline Thread* this_thread() { return running && running->fiber.owns(__builtin_frame_address(0)) ? running : nullptr; }

// The address space of the block whose turn it is, if memory is shared; 0 if it is global.
uintptr_t space_of(const void* memory);
void pause();  // ends the block's turn, or doesn't, at random

}  // namespace emulation
