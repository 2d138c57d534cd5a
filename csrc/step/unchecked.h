// Roots and quotients without a branch, for CUDA. nvcc's own check their operands, and branch, before the few
// instructions that nearly all operands need. Here these run for all operands, and where they don't suffice, the result
// is NaN. So a pack of elements takes one branch: where a result is NaN, the pack is computed anew. The instructions
// are nvcc's. Within PTX's bounds, the chip could begin them in 13 places from which they don't reach the nearest
// number (tests/ops/step/unchecked.cpp); as nvcc's results are the nearest, it doesn't.
#pragma once

#include "common/math.h"

namespace mpk {

// Off by 2 units in the last place at most. The chip takes subnormal numbers for 0.
MPK_FN float near_inverse_root(float x) {
#ifdef __CUDA_ARCH__
  float near;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return near;
#else
  return 1 / sqrt(x);
#endif
}

// The root from 2^-100 on. Below, NaN or a number that is near.
struct NearRoot {
  static MPK_FN float of(float x) { return of(x, near_inverse_root(x)); }
  static MPK_FN float of(float x, float near_inverse) {
    const float root = x * near_inverse;
    return fmaf(fmaf(-root, root, x), 0.5f * near_inverse, root);
  }
};

MPK_FN float nearest_quotient(float a, float b, float near_inverse) {
  const float inverse = fmaf(near_inverse, fmaf(-b, near_inverse, 1.0f), near_inverse), near = a * inverse;
  return fmaf(fmaf(b, near, -a), -inverse, near);
}

// A number in a rule's formula. It can only be compared by functions in which no NaN gets lost.
struct Unchecked {
  float value;

  MPK_FN Unchecked(float value = 0) : value(value) {}
  explicit MPK_FN operator float() const { return value; }

  friend MPK_FN Unchecked operator+(Unchecked a, Unchecked b) { return a.value + b.value; }
  friend MPK_FN Unchecked operator-(Unchecked a, Unchecked b) { return a.value - b.value; }
  friend MPK_FN Unchecked operator*(Unchecked a, Unchecked b) { return a.value * b.value; }

  // NaN unless `a` is 0 or not below 2^-62, and 0 <= b <= 2^64.
  friend MPK_FN Unchecked operator/(Unchecked a, Unchecked b) {
    const bool is_small = 2 * bit_cast<uint32_t>(a.value) - 1 < 2 * bit_cast<uint32_t>(0x1p-62f) - 1;
    const bool is_large = bit_cast<uint32_t>(b.value) > bit_cast<uint32_t>(0x1p64f);
    return is_small | is_large ? NAN : nearest_quotient(a.value, b.value, quotient(1.0f, b.value));
  }

  friend MPK_FN Unchecked maximum(Unchecked a, Unchecked b) { return mpk::maximum(a.value, b.value); }
  friend MPK_FN Unchecked sign(Unchecked x) { return x.value != x.value ? x.value : mpk::sign(x.value); }
};

template <>
struct SquareRoot<Unchecked> {
  // NaN unless 0 <= x < 2^64.
  static MPK_FN Unchecked of(Unchecked x) {
    const float near = near_inverse_root(fmaf(x.value, 0x1p64f, 0x1p-126f));  // the sum is x 2^64, unless x is 0
    return NearRoot::of(x.value * 0x1p64f, near) * 0x1p-32f;
  }
};

}  // namespace mpk
