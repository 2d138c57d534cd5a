// Moments in 8 bits: codes, and one fp32 scale for each kQuantized of them. The scale is the block's largest magnitude,
// and a code counts steps of the root, so that small values keep a relative precision of their own.
//
// exp_avg: scale * (q / 127)^2 with q's sign, q in -127 .. 127. It is off by scale * (1/127 + 1/254^2) at most.
//
// exp_avg_sq: its root is scale * (q / 255)^2, q in 0 .. 255, stored as q - 128. The root is off by
// scale * (1/255 + 1/510^2) at most, and 0 only where the value is, or would be as an fp32: else the update would
// explode.
//
// A decoded value is encoded as it was before, so a checkpoint in fp32 loses nothing (but where exp_avg_sq is
// subnormal: with a root's scale below 2^-47). With an inf or NaN among them, none of the kQuantized need be finite;
// with a scale below 2^-126 all are 0.
#pragma once

#include "adamw/split.h"
#include "common/numeric.h"

namespace mpk {

inline constexpr int kQuantized = 256;
inline constexpr float kSmallestScale = 0x1p-126f;

// q is a whole number, as a float (or a vector of them).
template <class F>
MPK_FN F decode_exp_avg(F q, float scale) {
  const F root = q * (1 / 127.0f);  // exactly 1 for 127
  return scale * (root * absolute(root));
}

template <class F>
MPK_FN F decode_exp_avg_sq(F q, float scale) {
  const F root = q * (1 / 255.0f);
  const F value = scale * (root * root);
  return value * value;
}

// What a block's largest exp_avg, or root of exp_avg_sq, is stored as.
MPK_FN float scale_of(float largest) { return largest < kSmallestScale ? 0.0f : largest; }

MPK_FN float inverse_of(float scale) { return scale == 0 ? 0.0f : 1 / scale; }

// A code is the last byte of these. NaN becomes 0: it is not larger than any number.
template <class F, class U = Bits<F>>
MPK_FN U encode_exp_avg(F value, float inverse) {
  const F steps = larger(SquareRoot<F>::of(absolute(value) * inverse) * 127.0f, F{});
  const U sign = bit_cast<U>(value) & 0x80000000u;
  return bit_cast<U>(bit_cast<F>(bit_cast<U>(steps) | sign) + kIntegers);
}

// root is that of exp_avg_sq. The code is q - 128.
template <class F, class U = Bits<F>>
MPK_FN U encode_exp_avg_sq(F root, float inverse) {
  const F steps = larger(SquareRoot<F>::of(root * inverse) * 255.0f, F{} + 1.0f);
  return bit_cast<U>((root > 0.0f ? steps : F{}) + (kIntegers - 128.0f));
}

}  // namespace mpk
