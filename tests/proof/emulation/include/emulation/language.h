// What CUDA C++ adds to C++: the keywords, the vector types and the built-in variables.
#pragma once

// libstdc++ and libc are included before the keywords become macros.
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include <algorithm>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// Stands after the type. Threads share such parameters: copies of 28 KB took two fifths of a step's time.
#define __grid_constant__ &

// Thread-local because that is the one storage class that puts a template's variables, too, where they can be found and
// poisoned (g++ 12 ignores section attributes there). All fibers of a block share one system thread, hence one copy.
#define __shared__ thread_local

// With CUDA's alignment: 2 and 4 elements load at once, 3 one by one.
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

namespace emulation {
// The scheduler sets these before it runs a thread.
struct Built {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
};
inline Built built;
}  // namespace emulation

static constexpr const uint3& threadIdx = emulation::built.thread_index;
static constexpr const uint3& blockIdx = emulation::built.block_index;
static constexpr const dim3& blockDim = emulation::built.block_size;
static constexpr const dim3& gridDim = emulation::built.grid_size;
