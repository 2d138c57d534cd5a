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
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

// Thread-local because that is the one storage class that puts a template's variables, too, where they can be found and
// poisoned (g++ 12 ignores section attributes there). All fibers of a block share one system thread, hence one copy.
#define __shared__ thread_local

// CUDA's alignment: 2 and 4 elements load at once, up to 16 bytes; 3 elements load one by one.
#define EMULATION_VECTOR(T, name)                                                \
  struct name##1 { T x; };                                                       \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                             \
  struct name##3 { T x, y, z; };                                                 \
  struct alignas(std::min<size_t>(16, 4 * sizeof(T))) name##4 { T x, y, z, w; }; \
  constexpr name##1 make_##name##1(T x) { return {x}; }                          \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                  \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }          \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATION_VECTOR(signed char, char)
EMULATION_VECTOR(unsigned char, uchar)
EMULATION_VECTOR(short, short)
EMULATION_VECTOR(unsigned short, ushort)
EMULATION_VECTOR(int, int)
EMULATION_VECTOR(unsigned int, uint)
EMULATION_VECTOR(long, long)
EMULATION_VECTOR(unsigned long, ulong)
EMULATION_VECTOR(long long, longlong)
EMULATION_VECTOR(unsigned long long, ulonglong)
EMULATION_VECTOR(float, float)
EMULATION_VECTOR(double, double)
#undef EMULATION_VECTOR

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
static constexpr int warpSize = 32;
