// The functions of CUDA that our kernels call, and no others. Add one here when a kernel needs it.
#pragma once

#include <cstring>
#include <type_traits>

#include "scheduler.h"

// ---- barriers and fences

inline void __syncthreads(emulation::Place place = {}) { emulation::meet_block("__syncthreads", false, place); }
inline int __syncthreads_or(int predicate, emulation::Place place = {}) {
  return emulation::meet_block("__syncthreads_or", predicate != 0, place) != 0;
}
inline void __syncwarp(unsigned mask = 0xffffffff, emulation::Place place = {}) {
  emulation::meet_warp("__syncwarp", emulation::Meeting::sync, mask, 0, 0, place);
}
inline void __threadfence() { emulation::fence(); }

// ---- shuffles

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, emulation::Place place = {}) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4 or 8 byte numbers");
  const unsigned source = emulation::lane() ^ lane_mask;
  if (source >= 32) emulation::fail("shuffles with lane mask " + std::to_string(lane_mask) + emulation::text(place));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulation::meet_warp("__shfl_xor_sync", emulation::Meeting::shuffle, mask, bits, source, place);
  memcpy(&value, &bits, sizeof(T));
  return value;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, emulation::Place place = {}) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value = std::max(value, __shfl_xor_sync(mask, value, lanes, place));
  return value;
}

// ---- atomics: threads switch only where they wait, so an update in steps is atomic

namespace emulation {

template <class Update>
unsigned atomic(unsigned* address, const Update& updated) {
  begin_atomic(address, sizeof(unsigned));
  unsigned old;
  copy(&old, address, sizeof(unsigned));
  const unsigned next = updated(old);
  copy(address, &next, sizeof(unsigned));
  return old;
}

}  // namespace emulation

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return emulation::atomic(address, [=](unsigned old) { return old + value; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return emulation::atomic(address, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}

// ---- loads and stores with a cache hint

namespace emulation {

// Without this check, the sanitizer would name this file instead of the kernel's.
template <class T>
void check_aligned(const char* name, const T* address, Place place) {
  const size_t past = reinterpret_cast<uintptr_t>(address) % alignof(T);
  if (past == 0) return;
  fail(std::string("calls ") + name + " on an address that is " + std::to_string(past) + " bytes past a multiple of " +
       std::to_string(alignof(T)) + text(place));
}

}  // namespace emulation

template <class T>
T __ldcs(const T* address, emulation::Place place = {}) {
  emulation::check_aligned("__ldcs", address, place);
  return *address;
}
template <class T>
T __ldcg(const T* address, emulation::Place place = {}) {
  emulation::check_aligned("__ldcg", address, place);
  T value;
  emulation::load_past_l1(&value, address, sizeof(T));
  return value;
}
template <class T>
void __stcs(T* address, std::common_type_t<T> value, emulation::Place place = {}) {
  emulation::check_aligned("__stcs", address, place);
  *address = value;
}

// ---- minimum, which CUDA has outside of namespaces

constexpr int64_t min(int64_t a, int64_t b) { return b < a ? b : a; }
