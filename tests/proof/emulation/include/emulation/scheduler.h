// What the kernels' headers ask of the scheduler (scheduler.cpp).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "language.h"

namespace emulation {

// Where in a kernel a thread waits. As a default argument it is the caller's place, however the compiler inlines.
struct Place {
  const char* file;
  int line;
  constexpr Place(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
};

std::string text(const Place& place);  // " at file:line"

// Waits for the whole block; returns how many threads brought `predicate`.
int meet_block(const char* name, bool predicate, Place place);

// Waits for the lanes in `mask`; returns what the lane `source` brought, or all ones, hence NaN, if that lane did not
// take part. Only a sync orders what the lanes wrote before what they read. It forgives a lane that has exited, as in
// CUDA; a shuffle does not.
enum class Meeting { sync, shuffle };
uint64_t meet_warp(const char* name, Meeting kind, unsigned mask, uint64_t value, unsigned source, Place place);

unsigned lane();

// A thread may read what another block has written if the writer has passed a fence and an atomic since, and the reader
// an atomic at the same address and a fence; and it must read past the L1 cache. races.h checks that kernels do so.
void fence();
void begin_atomic(void* address, size_t bytes);
void load_past_l1(void* to, const void* from, size_t bytes);
void copy(void* to, const void* from, size_t bytes);  // unchecked

// Ends the launch with cudaErrorLaunchFailure; `what` is a sentence. Outside a kernel it ends the process.
[[noreturn]] void fail(const std::string& what);

// Runs every thread of the grid. An empty answer is success, else it tells what went wrong.
std::string run_grid(dim3 grid, dim3 block, const std::function<void()>& kernel);

}  // namespace emulation
