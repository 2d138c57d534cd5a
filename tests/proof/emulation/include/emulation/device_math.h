// The numeric functions of device code that libm lacks.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "scheduler.h"

// ---- IEEE operations that CUDA never contracts; neither does g++ under -ffp-contract=off

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return sqrt(a); }

// ---- approximations: exact here, so a test that needs the GPU's error needs a GPU

inline float rsqrtf(float a) { return __frsqrt_rn(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
#define __expf expf  // macros, because glibc declares some of the names
#define __logf logf
#define __log2f log2f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanhf tanhf
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float a) { return fminf(fmaxf(a, 0.f), 1.f); }  // NaN becomes 0, as in CUDA

// ---- minimum and maximum, global as in CUDA; of NaN and a number the number

#define EMULATION_MIN_MAX(T)                          \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
EMULATION_MIN_MAX(int)
EMULATION_MIN_MAX(unsigned)
EMULATION_MIN_MAX(long)
EMULATION_MIN_MAX(unsigned long)
EMULATION_MIN_MAX(long long)
EMULATION_MIN_MAX(unsigned long long)
#undef EMULATION_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// ---- bits

namespace emulation {
template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
}  // namespace emulation

inline int __float_as_int(float a) { return emulation::bits<int>(a); }
inline unsigned __float_as_uint(float a) { return emulation::bits<unsigned>(a); }
inline float __int_as_float(int a) { return emulation::bits<float>(a); }
inline float __uint_as_float(unsigned a) { return emulation::bits<float>(a); }
inline long long __double_as_longlong(double a) { return emulation::bits<long long>(a); }
inline double __longlong_as_double(long long a) { return emulation::bits<double>(a); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(a); }
inline int __clzll(long long a) { return a == 0 ? 64 : __builtin_clzll(a); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t(a) * b) >> 32; }

// ---- conversions saturate, and NaN becomes 0, where C++ leaves both undefined

namespace emulation {
template <class To>
To saturated(float rounded) {
  constexpr double low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
  return std::isnan(rounded) ? To(0) : To(std::clamp(double(rounded), low, high));
}
}  // namespace emulation

inline int __float2int_rn(float a) { return emulation::saturated<int>(rintf(a)); }
inline int __float2int_rz(float a) { return emulation::saturated<int>(truncf(a)); }
inline unsigned __float2uint_rn(float a) { return emulation::saturated<unsigned>(rintf(a)); }
inline unsigned __float2uint_rz(float a) { return emulation::saturated<unsigned>(truncf(a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }

[[noreturn]] inline void __trap() { emulation::fail("calls __trap"); }
