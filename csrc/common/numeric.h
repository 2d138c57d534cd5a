// Number formats and what every kernel asks of them. Host and device, scalar and vector: no intrinsic is needed here,
// because each function is written over any type that has arithmetic and a matching unsigned integer (Bits).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define MPK_FN __host__ __device__ __forceinline__
#else
#define MPK_FN inline __attribute__((always_inline))
#endif

namespace mpk {

struct fp16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

enum class Dtype : int8_t { f32, f16, b16, f64 };

// Kernels compute in fp32, for fp64 tensors in fp64. Sums are held in fp64.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The unsigned integer (or vector of them) that has the size of F; simd.h adds the vectors.
template <class F>
struct BitsOf;
template <>
struct BitsOf<float> {
  using type = uint32_t;
};
template <>
struct BitsOf<double> {
  using type = uint64_t;
};
template <class F>
using Bits = typename BitsOf<F>::type;

template <class To, class From>
MPK_FN To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Largest magnitude that still rounds to a finite T, as bits of Compute<T>: anything above it, inf and NaN included,
// is non-finite once stored.
template <class T>
inline constexpr uint64_t kLargestFinite = 0;
template <>
inline constexpr uint64_t kLargestFinite<float> = 0x7f7fffff;
template <>
inline constexpr uint64_t kLargestFinite<double> = 0x7fefffffffffffff;
template <>
inline constexpr uint64_t kLargestFinite<bf16> = 0x7f7f7fff;
template <>
inline constexpr uint64_t kLargestFinite<fp16> = 0x477fefff;

// Returns |x| as an integer: inf comes after all numbers, and NaN after inf.
template <class F, class U = Bits<F>>
MPK_FN U magnitude(const F& x) {
  return bit_cast<U>(x) & (~U{} >> 1);
}

// simd.h specialises this for vectors of floats, because GCC 12 makes two instructions of it.
template <class U>
struct Larger {
  static MPK_FN U of(U a, U b) { return a > b ? a : b; }
};

template <class U>
MPK_FN U larger(U a, U b) {
  return Larger<U>::of(a, b);
}

// Whether x will be inf or NaN after rounding to T. Integers only: isfinite() or a bool would keep compilers from
// vectorising the loop around this.
template <class T, class F>
MPK_FN auto is_non_finite(const F& x) {
  using Word = std::conditional_t<sizeof(Compute<T>) == 8, uint64_t, uint32_t>;
  return magnitude(x) > Word{kLargestFinite<T>};
}

// A number that the compiler knows. std::integral_constant is no use in CUDA, because it converts on the host alone.
template <int number>
struct Constant {
  MPK_FN constexpr operator int() const { return number; }
};

// Calls body(i) for i = 0 .. count - 1. Each i is a constant, so that arrays indexed by i stay in registers.
#ifdef __CUDACC__
#pragma nv_exec_check_disable  // a kernel's body is for the device alone
#endif
template <int count, class Body>
MPK_FN void for_each_index(const Body& body) {
  if constexpr (count > 0) {
    for_each_index<count - 1>(body);
    body(Constant<count - 1>{});
  }
}

// simd.h adds the vectors.
template <class F>
struct SquareRoot {
  static MPK_FN F of(F x) { return sqrt(x); }
};

template <class F, class U = Bits<F>>
MPK_FN F absolute(F x) {
  return bit_cast<F>(bit_cast<U>(x) & (~U{} >> 1));
}

// As torch.maximum: NaN wins.
template <class F>
MPK_FN F maximum(F a, F b) {
  const F larger = a > b ? a : b;  // b if either is NaN
  return a != a ? a : larger;
}

// As torch.sign: 0 for NaN.
template <class F>
MPK_FN F sign(F x) {
  const F zero{}, one = zero + 1;
  return x > 0 ? one : x < 0 ? -one : zero;
}

// Convert 16-bit formats to fp32 and back, round to nearest even, in integers, for machines without the instruction. U
// is uint32_t or a vector of it; the 16 bits sit in the low half of each word. No fp32 subnormal is ever an operand, so
// torch.set_flush_denormal changes nothing.
template <class U>
MPK_FN U fp32_bits_of_bf16(U half) {
  return half << 16;
}

// Whether `word` holds the bits of an fp32 NaN. For vectors, simd.h compares the floats, in one instruction.
template <class U>
struct IsNan {
  static MPK_FN auto of(U word) { return (word & 0x7fffffffu) > 0x7f800000u; }
};

template <class U>
MPK_FN U bf16_bits_of_fp32(U word) {
  const U rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  const U quiet_nan = (word >> 16) | 0x40u;
  return IsNan<U>::of(word) ? quiet_nan : rounded;
}

template <class F, class U = Bits<F>>
MPK_FN U fp32_bits_of_fp16(Bits<F> half) {
  const U magnitude = half & 0x7fffu;
  const U normal = (magnitude << 13) + 0x38000000u;  // the exponent's bias grows from 15 to 127
  const U subnormal = bit_cast<U>(bit_cast<F>(normal + 0x00800000u) - 0x1p-14f);
  const U finite = magnitude < 0x0400u ? subnormal : normal;
  return (magnitude < 0x7c00u ? finite : normal + 0x38000000u) | (half & 0x8000u) << 16;
}

template <class F, class U = Bits<F>>
MPK_FN U fp16_bits_of_fp32(Bits<F> word) {
  const U magnitude = word & 0x7fffffffu;
  const U normal = (magnitude - 0x37fff001u + ((magnitude >> 13) & 1u)) >> 13;
  const U subnormal = bit_cast<U>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000u;  // ulp(0.5f) is fp16's smallest number
  const U finite = magnitude < 0x38800000u ? subnormal : normal;
  const U quiet_nan = (magnitude >> 13 & 0x03ffu) | 0x7e00u;
  const U infinite = quiet_nan * 0u + 0x7c00u;
  const U number = magnitude > uint32_t{kLargestFinite<fp16>} ? infinite : finite;
  return (magnitude > 0x7f800000u ? quiet_nan : number) | (word >> 16 & 0x8000u);
}

// Converts fp16 to fp32 bits and back. simd.h specialises this for vectors.
template <class F>
struct Fp16 {
  using Half = Bits<F>;
  static MPK_FN Bits<F> widen(Half half) { return fp32_bits_of_fp16<F>(half); }
  static MPK_FN Half narrow(Bits<F> word) { return fp16_bits_of_fp32<F>(word); }
};

// Calls body with a value of the C++ type that dtype names. The only switch over dtypes.
#ifdef __CUDACC__
#pragma nv_exec_check_disable  // a launcher's body is for the host alone
#endif
template <class Body>
MPK_FN auto with_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::f16:
      return body(fp16{});
    case Dtype::b16:
      return body(bf16{});
    case Dtype::f64:
      return body(double{});
    default:
      return body(float{});
  }
}

}  // namespace mpk
