// The functions that device code calls. Overloads are CUDA's own: what nvcc would not find is not here either.
#pragma once

#include <cstring>
#include <type_traits>

#include "scheduler.h"

// ---- barriers and fences

inline void __syncthreads(emulation::Place place = {}) { emulation::meet_block("__syncthreads", false, place); }
inline int __syncthreads_count(int predicate, emulation::Place place = {}) {
  return emulation::meet_block("__syncthreads_count", predicate != 0, place);
}
inline int __syncthreads_or(int predicate, emulation::Place place = {}) {
  return emulation::meet_block("__syncthreads_or", predicate != 0, place) != 0;
}
inline int __syncthreads_and(int predicate, emulation::Place place = {}) {
  return emulation::meet_block("__syncthreads_and", predicate == 0, place) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffff, emulation::Place place = {}) {
  emulation::meet_warp("__syncwarp", mask, 0, 0, emulation::Exited::forgiven, emulation::Memory::ordered, place);
}
inline void __threadfence() { emulation::fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { emulation::fence(); }

// ---- votes

namespace emulation {

inline unsigned vote(const char* name, unsigned mask, bool predicate, Place place) {
  return meet_warp(name, mask, predicate, 0, Exited::forgiven, Memory::unordered, place).nonzero;
}

}  // namespace emulation

inline unsigned __ballot_sync(unsigned mask, int predicate, emulation::Place place = {}) {
  return emulation::vote("__ballot_sync", mask, predicate != 0, place);
}
inline int __any_sync(unsigned mask, int predicate, emulation::Place place = {}) {
  return emulation::vote("__any_sync", mask, predicate != 0, place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulation::Place place = {}) {
  return emulation::vote("__all_sync", mask, predicate == 0, place) == 0;
}

// ---- shuffles

namespace emulation {

template <class T>
T shuffle(const char* name, unsigned mask, T value, unsigned source, Place place) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4 or 8 byte numbers");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = meet_warp(name, mask, bits, source, Exited::failure, Memory::unordered, place).value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned last_of_segment(int width, Place place) {
  const bool power_of_two = width > 0 && (width & (width - 1)) == 0;
  if (!power_of_two || width > 32) fail("shuffles with width " + std::to_string(width) + text(place));
  return lane() | (width - 1);
}

}  // namespace emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, emulation::Place place = {}) {
  const unsigned first = emulation::last_of_segment(width, place) - (width - 1);
  return emulation::shuffle("__shfl_sync", mask, value, first + (unsigned(source) & (width - 1)), place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, emulation::Place place = {}) {
  const unsigned first = emulation::last_of_segment(width, place) - (width - 1), self = emulation::lane();
  return emulation::shuffle("__shfl_up_sync", mask, value, delta > self - first ? self : self - delta, place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, emulation::Place place = {}) {
  const unsigned last = emulation::last_of_segment(width, place), self = emulation::lane();
  return emulation::shuffle("__shfl_down_sync", mask, value, delta > last - self ? self : self + delta, place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, emulation::Place place = {}) {
  const unsigned last = emulation::last_of_segment(width, place), self = emulation::lane(), source = self ^ lane_mask;
  return emulation::shuffle("__shfl_xor_sync", mask, value, source > last ? self : source, place);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, emulation::Place place = {}) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const unsigned other = __shfl_xor_sync(mask, value, lanes, 32, place);
    value = other > value ? other : value;
  }
  return value;
}

// ---- atomics: threads switch only where they wait, so an update in steps is atomic

namespace emulation {

template <class T, class Update>
T atomic(T* address, const Update& updated) {
  begin_atomic(address, sizeof(T));
  T old;
  copy(&old, address, sizeof(T));
  const T next = updated(old);
  copy(address, &next, sizeof(T));
  return old;
}

}  // namespace emulation

#define EMULATION_ATOMIC(name, T, updated)                                  \
  inline T name(T* address, T value) {                                      \
    return emulation::atomic(address, [=](T old) -> T { return updated; }); \
  }
#define EMULATION_INTEGER_ATOMICS(T)                                                        \
  EMULATION_ATOMIC(atomicExch, T, value)                                                    \
  EMULATION_ATOMIC(atomicMin, T, std::min(old, value))                                      \
  EMULATION_ATOMIC(atomicMax, T, std::max(old, value))                                      \
  EMULATION_ATOMIC(atomicAnd, T, old& value)                                                \
  EMULATION_ATOMIC(atomicOr, T, old | value)                                                \
  EMULATION_ATOMIC(atomicXor, T, old ^ value)                                               \
  inline T atomicCAS(T* address, T compare, T value) {                                      \
    return emulation::atomic(address, [=](T old) { return old == compare ? value : old; }); \
  }
EMULATION_INTEGER_ATOMICS(int)
EMULATION_INTEGER_ATOMICS(unsigned)
EMULATION_INTEGER_ATOMICS(unsigned long long)
EMULATION_ATOMIC(atomicAdd, int, int(unsigned(old) + unsigned(value)))
EMULATION_ATOMIC(atomicAdd, unsigned, old + value)
EMULATION_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATION_ATOMIC(atomicAdd, float, old + value)
EMULATION_ATOMIC(atomicAdd, double, old + value)
EMULATION_ATOMIC(atomicSub, int, int(unsigned(old) - unsigned(value)))
EMULATION_ATOMIC(atomicSub, unsigned, old - value)
EMULATION_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATION_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
EMULATION_ATOMIC(atomicExch, float, value)
EMULATION_ATOMIC(atomicMin, long long, std::min(old, value))
EMULATION_ATOMIC(atomicMax, long long, std::max(old, value))
#undef EMULATION_INTEGER_ATOMICS
#undef EMULATION_ATOMIC

// ---- loads and stores with a cache hint

namespace emulation {

// The sanitizer would name this file instead of the kernel's.
template <class T>
void check_aligned(const char* name, const T* address, Place place) {
  const size_t past = reinterpret_cast<uintptr_t>(address) % alignof(T);
  if (past == 0) return;
  fail(std::string("calls ") + name + " on an address that is " + std::to_string(past) + " bytes past a multiple of " +
       std::to_string(alignof(T)) + text(place));
}

}  // namespace emulation

#define EMULATION_LOAD(name)                              \
  template <class T>                                      \
  T name(const T* address, emulation::Place place = {}) { \
    emulation::check_aligned(#name, address, place);      \
    return *address;                                      \
  }
#define EMULATION_LOAD_PAST_L1(name)                      \
  template <class T>                                      \
  T name(const T* address, emulation::Place place = {}) { \
    emulation::check_aligned(#name, address, place);      \
    T value;                                              \
    emulation::load_past_l1(&value, address, sizeof(T));  \
    return value;                                         \
  }
#define EMULATION_STORE(name)                                                       \
  template <class T>                                                                \
  void name(T* address, std::common_type_t<T> value, emulation::Place place = {}) { \
    emulation::check_aligned(#name, address, place);                                \
    *address = value;                                                               \
  }
EMULATION_LOAD(__ldg)
EMULATION_LOAD(__ldca)
EMULATION_LOAD(__ldcs)
EMULATION_LOAD(__ldlu)
EMULATION_LOAD_PAST_L1(__ldcg)
EMULATION_LOAD_PAST_L1(__ldcv)
EMULATION_STORE(__stwb)
EMULATION_STORE(__stcg)
EMULATION_STORE(__stcs)
EMULATION_STORE(__stwt)
#undef EMULATION_LOAD
#undef EMULATION_LOAD_PAST_L1
#undef EMULATION_STORE

#include "device_math.h"
