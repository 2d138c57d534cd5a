// Adjacent elements of an array, as a CUDA thread holds them: several are read and written by one access.
#pragma once

#include "common/cuda.h"

namespace mpk {

template <class T, int count>
struct Elements {
  T at[count];
};

// The widest word, of 16 bytes at most, in which so many bytes (a power of two) are read and written.
template <size_t bytes>
using WordOf = std::conditional_t<
    bytes % sizeof(uint4) == 0, uint4,
    std::conditional_t<bytes % sizeof(uint2) == 0, uint2,
                       std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>>>;

template <int count, class T>
__device__ Elements<T, count> load(const T* address) {
  const T* const from = in_global(address);
  if constexpr (count == 1) {
    return {*from};
  } else {
    using Word = WordOf<count * sizeof(T)>;
    Elements<Word, count * sizeof(T) / sizeof(Word)> raw;
    for (size_t i = 0; i < sizeof raw / sizeof(Word); ++i) raw.at[i] = reinterpret_cast<const Word*>(from)[i];
    return bit_cast<Elements<T, count>>(raw);
  }
}

template <class T, int count>
__device__ void store(T* address, const Elements<T, count>& from) {
  using Word = WordOf<count * sizeof(T)>;
  const auto raw = bit_cast<Elements<Word, count * sizeof(T) / sizeof(Word)>>(from);
  // Unlike this intrinsic, a plain store of registers that a branch has filled is split into single words by nvcc 13.
  for (size_t i = 0; i < sizeof raw / sizeof(Word); ++i) __stcs(reinterpret_cast<Word*>(address) + i, raw.at[i]);
}

// Loads data that is read once. The intrinsic shares its pointer with a store; a plain load would copy the pointer.
template <int count, class T>
__device__ Elements<T, count> load_once(const T* address) {
  using Word = WordOf<count * sizeof(T)>;
  Elements<Word, count * sizeof(T) / sizeof(Word)> raw;
  for (size_t i = 0; i < sizeof raw / sizeof(Word); ++i) raw.at[i] = __ldcs(reinterpret_cast<const Word*>(address) + i);
  return bit_cast<Elements<T, count>>(raw);
}

template <class T, int count>
__device__ Elements<float, count> widened(const Elements<T, count>& from) {
  Elements<float, count> wide;
  if constexpr (std::is_same_v<T, bf16> && count % 2 == 0) {  // by words, else nvcc 13 shifts a high half twice
    const auto words = bit_cast<Elements<uint32_t, count / 2>>(from);
    for (int i = 0; i < count; ++i) {
      const uint32_t word = words.at[i / 2];
      wide.at[i] = bit_cast<float>(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  } else {
    for (int i = 0; i < count; ++i) wide.at[i] = widen(from.at[i]);
  }
  return wide;
}

// Elements as they lie in memory, in 32 bits or in 16. Load all arrays before widening any: a load after a dtype branch
// waits for earlier loads, as it would if both widths shared registers.
template <int count>
struct Raw {
  Elements<uint32_t, count> words;
  Elements<uint16_t, count> halves;
};

template <int count>
__device__ Raw<count> load_raw(Dtype dtype, const void* array, int64_t first) {
  Raw<count> raw;
  if (dtype == Dtype::f32) {
    raw.words = load_once<count>(static_cast<const uint32_t*>(array) + first);
  } else {
    raw.halves = load_once<count>(static_cast<const uint16_t*>(array) + first);
  }
  return raw;
}

template <int count>
__device__ Elements<float, count> widened(Dtype dtype, const Raw<count>& raw) {
  if (dtype == Dtype::f32) return bit_cast<Elements<float, count>>(raw.words);
  return dtype == Dtype::b16 ? widened(bit_cast<Elements<bf16, count>>(raw.halves))
                             : widened(bit_cast<Elements<fp16, count>>(raw.halves));
}

template <int count>
__device__ void store_as(Dtype dtype, void* array, int64_t first, const Elements<float, count>& wide) {
  if (dtype == Dtype::f32) return store(static_cast<float*>(array) + first, wide);
  const auto store_rounded = [&](auto zero) {
    Elements<decltype(zero), count> rounded;
    for (int i = 0; i < count; ++i) narrow(wide.at[i], rounded.at[i]);
    store(static_cast<decltype(zero)*>(array) + first, rounded);
  };
  dtype == Dtype::b16 ? store_rounded(bf16{}) : store_rounded(fp16{});
}

}  // namespace mpk
