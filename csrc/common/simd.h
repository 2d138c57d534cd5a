// Vectors for CPU kernels. Each *_cpu.cpp is compiled once per instruction set (MPK_ISA), each time into a namespace of
// that name; the widest one that the machine has is picked at run time (MPK_BEST). Arithmetic is the compilers' own
// vector extension; only loads, stores and conversions need intrinsics, and all of those are here.
#pragma once

#include <cmath>

#include "common/math.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own _mm512_undefined (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#ifdef MPK_X86
#include <immintrin.h>
#endif

namespace mpk::MPK_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));  // half as many lanes
typedef uint64_t LongWords __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Codes __attribute__((vector_size(kLanes)));

}  // namespace mpk::MPK_ISA

namespace mpk {
template <>
struct BitsOf<MPK_ISA::Floats> {
  using type = MPK_ISA::Words;
};
template <>
struct BitsOf<MPK_ISA::Doubles> {
  using type = MPK_ISA::LongWords;
};
template <>
struct SquareRoot<MPK_ISA::Floats> {
  static MPK_FN MPK_ISA::Floats of(MPK_ISA::Floats x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
    return _mm256_sqrt_ps(x);
#else
    for (int lane = 0; lane < MPK_ISA::kLanes; ++lane) x[lane] = std::sqrt(x[lane]);
    return x;
#endif
  }
};
template <>
struct IsNan<MPK_ISA::Words> {
  static MPK_FN auto of(MPK_ISA::Words word) {
    const auto x = bit_cast<MPK_ISA::Floats>(word);
    return x != x;
  }
};
#ifdef MPK_X86
template <>
struct Larger<MPK_ISA::Floats> {
  static MPK_FN MPK_ISA::Floats of(MPK_ISA::Floats a, MPK_ISA::Floats b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return _mm_max_ps(a, b);
#endif
  }
};
#endif
template <>
struct Fma<MPK_ISA::Floats> {
  static MPK_FN MPK_ISA::Floats of(MPK_ISA::Floats a, MPK_ISA::Floats b, MPK_ISA::Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
  }
};
template <>
struct SquareRoot<MPK_ISA::Doubles> {
  static MPK_FN MPK_ISA::Doubles of(MPK_ISA::Doubles x) {
    for (int lane = 0; lane < MPK_ISA::kLanes / 2; ++lane) x[lane] = std::sqrt(x[lane]);
    return x;
  }
};
}  // namespace mpk

namespace mpk::MPK_ISA {

template <class V>
MPK_FN V load_bytes(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
MPK_FN void store_bytes(void* to, const V& v) {
  memcpy(to, &v, sizeof v);
}

MPK_FN Floats load(const float* from) { return load_bytes<Floats>(from); }
MPK_FN Doubles load(const double* from) { return load_bytes<Doubles>(from); }
MPK_FN void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }
MPK_FN void store(double* to, Doubles x) { memcpy(to, &x, sizeof x); }

// GCC 12 would widen and narrow vectors by unpacking halves, where one of these instructions does it. An int8 is a
// whole number: it is loaded as a float, and stored from the low bits of a word.
#if defined(__AVX512F__)
MPK_FN Words widen(Halves h) { return bit_cast<Words>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(h))); }
MPK_FN Halves narrow(Words w) { return bit_cast<Halves>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(w))); }
MPK_FN Doubles low_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
MPK_FN Doubles high_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
MPK_FN Floats load(const int8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes<__m128i>(from))); }
MPK_FN void store(int8_t* to, Words x) {
  const __m128i codes = _mm512_cvtepi32_epi8(bit_cast<__m512i>(x));
  memcpy(to, &codes, sizeof codes);
}
MPK_FN Floats load(const fp16* from) { return _mm512_cvtph_ps(load_bytes<__m256i>(from)); }
MPK_FN void store(fp16* to, Floats x) {
  const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  memcpy(to, &halves, sizeof halves);
}
#elif defined(__AVX2__)
MPK_FN Words widen(Halves h) { return bit_cast<Words>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(h))); }
MPK_FN Halves narrow(Words w) {
  const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(w), bit_cast<__m256i>(w));
  return bit_cast<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
MPK_FN Doubles low_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
MPK_FN Doubles high_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
MPK_FN Floats load(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_bytes<int64_t>(from))));
}
MPK_FN void store(int8_t* to, Words x) {
  const __m256i low_bytes = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                             0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const Words packed = bit_cast<Words>(_mm256_shuffle_epi8(bit_cast<__m256i>(x), low_bytes));
  const uint32_t codes[2] = {packed[0], packed[4]};
  memcpy(to, codes, sizeof codes);
}
MPK_FN Floats load(const fp16* from) { return _mm256_cvtph_ps(load_bytes<__m128i>(from)); }
MPK_FN void store(fp16* to, Floats x) {
  const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  memcpy(to, &halves, sizeof halves);
}
#else
MPK_FN Words widen(Halves h) { return __builtin_convertvector(h, Words); }
MPK_FN Halves narrow(Words w) { return __builtin_convertvector(w, Halves); }
MPK_FN Doubles low_doubles(Floats x) { return Doubles{x[0], x[1]}; }
MPK_FN Doubles high_doubles(Floats x) { return Doubles{x[2], x[3]}; }
MPK_FN Floats load(const int8_t* from) { return __builtin_convertvector(load_bytes<Codes>(from), Floats); }
MPK_FN void store(int8_t* to, Words x) {
  const Codes codes = __builtin_convertvector(x, Codes);
  memcpy(to, &codes, sizeof codes);
}
MPK_FN Floats load(const fp16* from) {
  return bit_cast<Floats>(fp32_bits_of_fp16<Floats>(widen(load_bytes<Halves>(from))));
}
MPK_FN void store(fp16* to, Floats x) {
  const Halves halves = narrow(fp16_bits_of_fp32<Floats>(bit_cast<Words>(x)));
  memcpy(to, &halves, sizeof halves);
}
#endif

MPK_FN Floats load(const bf16* from) { return bit_cast<Floats>(fp32_bits_of_bf16(widen(load_bytes<Halves>(from)))); }
MPK_FN void store(bf16* to, Floats x) {
  const Halves halves = narrow(bf16_bits_of_fp32(bit_cast<Words>(x)));
  memcpy(to, &halves, sizeof halves);
}

}  // namespace mpk::MPK_ISA

namespace mpk {
template <>
struct Fp16<MPK_ISA::Floats> {
  using Half = MPK_ISA::Halves;
  static MPK_FN MPK_ISA::Words widen(Half halves) {
    return bit_cast<MPK_ISA::Words>(MPK_ISA::load(reinterpret_cast<const fp16*>(&halves)));
  }
  static MPK_FN Half narrow(MPK_ISA::Words word) {
    Half halves;
    MPK_ISA::store(reinterpret_cast<fp16*>(&halves), bit_cast<MPK_ISA::Floats>(word));
    return halves;
  }
};
}  // namespace mpk

namespace mpk::MPK_ISA {

// How many elements of T a vector holds.
template <class T>
inline constexpr int kLanesOf = sizeof(Floats) / sizeof(Compute<T>);
// How many elements for_each_block takes at a time: as many with every instruction set.
inline constexpr int kBlock = 32;

// Calls body(pointer to kBlock elements) along data. The last, incomplete block is a copy that is filled up with pad,
// and written back where T isn't const.
template <class T, class Body>
MPK_FN void for_each_block(T* data, int64_t size, std::remove_const_t<T> pad, const Body& body) {
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) body(data + i);
  if (i == size) return;
  std::remove_const_t<T> last[kBlock];
  for (auto& element : last) element = pad;
  memcpy(last, data + i, (size - i) * sizeof(T));
  body(last);
  if constexpr (!std::is_const_v<T>) memcpy(data + i, last, (size - i) * sizeof(T));
}

template <class Mask>
MPK_FN bool any(Mask mask) {
  bool found = false;
  for (unsigned lane = 0; lane < sizeof(mask) / sizeof(mask[0]); ++lane) found |= mask[lane] != 0;
  return found;
}

}  // namespace mpk::MPK_ISA
