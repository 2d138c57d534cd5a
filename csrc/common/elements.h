// Adjacent elements of an array, as a CUDA thread holds them: several are read and written 16 bytes at a time.
#pragma once

#include "common/cuda.h"

namespace mpk {

template <class T, int count>
struct Elements {
  T at[count];
};

template <int count, class T>
__device__ Elements<T, count> load(const T* address) {
  const T* const from = in_global(address);
  if constexpr (count == 1) {
    return {*from};
  } else {
    using Word = std::conditional_t<count * sizeof(T) % sizeof(uint4) == 0, uint4, uint2>;
    Elements<Word, count * sizeof(T) / sizeof(Word)> raw;
    for (size_t i = 0; i < sizeof raw / sizeof(Word); ++i) raw.at[i] = reinterpret_cast<const Word*>(from)[i];
    return bit_cast<Elements<T, count>>(raw);
  }
}

template <class T, int count>
__device__ void store(T* address, const Elements<T, count>& from) {
  T* const to = in_global(address);
  if constexpr (count == 1) {
    *to = from.at[0];
  } else {
    using Word = std::conditional_t<count * sizeof(T) % sizeof(uint4) == 0, uint4, uint2>;
    const auto raw = bit_cast<Elements<Word, count * sizeof(T) / sizeof(Word)>>(from);
    // As an intrinsic: nvcc 13 splits a plain store of registers that a branch has filled into single words.
    for (size_t i = 0; i < sizeof raw / sizeof(Word); ++i) __stcs(reinterpret_cast<Word*>(to) + i, raw.at[i]);
  }
}

// In the computing type, and back.
template <class C, int count>
__device__ Elements<C, count> load_as(Dtype dtype, const void* array, int64_t first) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Elements<C, count> wide{};
    if constexpr (std::is_same_v<C, Compute<T>>) {
      const auto narrow = load<count>(static_cast<const T*>(array) + first);
      for (int i = 0; i < count; ++i) wide.at[i] = widen(narrow.at[i]);
    }
    return wide;
  });
}

template <class C, int count>
__device__ void store_as(Dtype dtype, void* array, int64_t first, const Elements<C, count>& wide) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<C, Compute<T>>) {
      Elements<T, count> rounded;
      for (int i = 0; i < count; ++i) narrow(wide.at[i], rounded.at[i]);
      store(static_cast<T*>(array) + first, rounded);
    }
  });
}

}  // namespace mpk
