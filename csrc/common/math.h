// Sigmoid, the normal distribution and tanh, without a branch. NaN stays NaN. Fp32Math is accurate to fp32's last bits,
// for float and vectors of floats; HalfMath for numbers that come from 16 bits and are rounded to 16 bits.
#pragma once

#include "common/numeric.h"

namespace mpk {

// A product and a sum, rounded once. simd.h adds the vectors; a machine without the instruction rounds twice.
template <class F>
struct Fma {
  static MPK_FN F of(F a, F b, F c) { return fmaf(a, b, c); }
};

template <class F, class B>
MPK_FN F every_lane(B b) {
  if constexpr (std::is_same_v<F, B>)
    return b;
  else
    return F{} + b;
}

template <class F, class B, class C>
MPK_FN F fused(F a, B b, C c) {
  return Fma<F>::of(a, every_lane<F>(b), every_lane<F>(c));
}

// coefficients[0] + x (coefficients[1] + x (...
template <class F, int count>
MPK_FN F polynomial(F x, const float (&coefficients)[count]) {
  F sum = F{} + coefficients[count - 1];
  for (int i = count - 2; i >= 0; --i) sum = fused(sum, x, coefficients[i]);
  return sum;
}

#ifdef __CUDA_ARCH__
// The chip's own instructions: the relative error of 2^x is 2^-22.5 at most, that of 1 / x one rounding.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
__device__ __forceinline__ float quotient(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
}
#else
inline float power_of_two(float x) { return exp2f(x); }
template <class F>
MPK_FN F quotient(F a, F b) {
  return a / b;
}
#endif

// Returns exp(x + low) for x <= 0, where low is what rounding took off x: 2^n e^r with |r| <= log(2) / 2. Returns 0
// instead of subnormal numbers, which take CPUs a hundred cycles each.
template <class F, class U = Bits<F>>
MPK_FN F exponential(F x, F low = F{}) {
  const F bounded = x < -87.0f ? F{} - 87.0f : x;
#ifdef __CUDA_ARCH__
  const F exponent = bounded * 1.44269504f, rest = fused(bounded, 1.44269504f, -exponent) + bounded * 1.92596299e-8f;
  const F power = power_of_two(exponent);
  return x < -87.0f ? 0.0f : fused(power, fused(rest, 0.693147181f, low), power);
#else
  const float q[] = {0.49999994f, 0.16666515f, 0.041668456f, 0.00836942f, 0.0013813142f};  // (e^r - 1 - r) / r^2
  const F shifted = fused(bounded, 1.44269504f, 0x1.8p23f);                                // its low bits are n
  const F n = shifted - 0x1.8p23f;
  const F r = fused(n, F{} - 1.42860677e-6f, fused(n, F{} - 0.693145752f, bounded)) + low;
  const F result = fused(r * r, polynomial(r, q), r) + 1.0f;
  const U power = bit_cast<U>(shifted) - (0x4b400000u - 127u);
  return x < -87.0f ? F{} : result * bit_cast<F>(power << 23);
#endif
}

// sigmoid(z) and sigmoid(-z), each as accurate as the other.
template <class F>
struct Logistic {
  F of_z, of_minus_z;
};

// The normal distribution's density at z, and its integral up to z: 1/2 erfc(-z / sqrt(2)), accurate in the tail too.
template <class F>
struct Normal {
  F density, integral;
};

struct Fp32Math {
  template <class F>
  static MPK_FN Logistic<F> logistic(F z) {
    const F e = exponential(F{} - absolute(z));
    const F large = quotient(F{} + 1.0f, 1.0f + e), small = e * large;
    return {z < 0.0f ? small : large, z < 0.0f ? large : small};
  }

  // The integral beyond |z| is exp(-z^2 / 2) times a smooth function, which times (1 + |z|) is a polynomial in s.
  template <class F>
  static MPK_FN Normal<F> normal(F z) {
    const float tail[] = {0.472053200f,    -0.0967034623f,  0.0139996074f,   0.0285999533f,
                          -0.0321974754f,  0.0179402381f,   -0.00500327535f, -0.000302875327f,
                          0.000691303808f, -6.30362993e-5f, -7.25551799e-5f};
    const F magnitude = absolute(z);
    const F a = magnitude > 12.8f ? F{} + 12.8f : magnitude;
    const F half = 0.5f * a, square = half * a;
    const F bell = exponential(F{} - square, F{} - fused(half, a, F{} - square));
    const F e = magnitude > 12.8f ? F{} : bell;  // else `beyond` would be subnormal
    const F one_and = 1.0f + a, four_and = 4.0f + a,
            inverse = quotient(F{} + 1.0f, one_and * four_and);  // one division, not two
    const F s = (a - 4.0f) * one_and * inverse;
    const F beyond = e * (polynomial(s, tail) * four_and * inverse);
    return {e * 0.398942280f, z < 0.0f ? beyond : 1.0f - beyond};
  }

  template <class F>
  static MPK_FN F tanh(F z) {
    // (tanh z - z) / z^3
    const float near_zero[] = {-0.33333319f, 0.13332602f, -0.05385386f, 0.02107776f, -0.00628247f};
    const F a = absolute(z), square = a * a;
    const F e = exponential(-2.0f * a);
    const F far = quotient(1.0f - e, 1.0f + e);
    const F magnitude = a < 0.55f ? fused(square * a, polynomial(square, near_zero), a) : far;
    return z < 0.0f ? F{} - magnitude : magnitude;
  }
};

// The chip's instructions as they are: infinite powers and quotients of 0 come out right without a bound on z.
struct HalfMath {
  static MPK_FN Logistic<float> logistic(float z) {
    const float e = power_of_two(z * -1.44269504f), s = quotient(1.0f, 1.0f + e);
    return {s, fminf(fmaxf(e * s, 0.0f), 1.0f)};  // 1 - s would cancel; 0 where e is inf and s is 0
  }

  // The integral beyond |z| is exp(-z^2 / 2) times t times a polynomial in t, most accurate where gelu's slope is 0.
  static MPK_FN Normal<float> normal(float z) {
    const float tail[] = {0.119626395f,   0.120798349f, 0.0996376723f, 0.129468992f,
                          -0.0553934760f, 0.208206221f, -0.158275813f, 0.0359316990f};
    const float e = power_of_two(z * z * -0.721347520f), t = quotient(1.0f, fmaf(fabsf(z), 0.3f, 1.0f));
    const float beyond = e * (t * polynomial(t, tail)), step = z < 0.0f ? 0.0f : 1.0f;
    return {e * 0.398942280f, fabsf(step - beyond)};
  }

  static MPK_FN float tanh(float z) {
    const float near_zero[] = {-0.333304852f, 0.132466495f, -0.0463218875f};
    const float a = fabsf(z), square = a * a;
    const float far = fmaf(-2.0f, quotient(1.0f, 1.0f + power_of_two(a * 2.88539008f)), 1.0f);
    const float magnitude = a < 0.45f ? fmaf(square * a, polynomial(square, near_zero), a) : far;
    return copysignf(magnitude, z);
  }
};

}  // namespace mpk
