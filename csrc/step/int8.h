// States in 8 bits: codes, and one fp32 scale for each kQuantized of them. The scale is the block's largest magnitude,
// and a code counts steps of the root, so that small values keep a relative precision of their own.
//
// Sign::any (exp_avg): scale * (q / 127)^2 with q's sign, q in -127 .. 127. It is off by scale * (1/127 + 1/254^2) at
// most.
//
// Sign::not_negative (exp_avg_sq): the value's root is coded, as scale * (q / 255)^2, q in 0 .. 255, stored as q - 128.
// The root is off by scale * (1/255 + 1/510^2) at most, and 0 only where the value is, or would be as an fp32: else an
// update that is divided by the root would explode.
//
// A decoded value is encoded as it was before, so a checkpoint in fp32 loses nothing (but where a not negative value is
// subnormal: with a root's scale below 2^-47). With an inf or NaN among them, none of the kQuantized need be finite;
// with a scale below 2^-126 all are 0.
#pragma once

#include "step/split.h"

namespace mpk {

// The values that a state may have, by which its code is chosen.
enum class Sign { any, not_negative };

inline constexpr int kQuantized = 256;
inline constexpr float kSmallestScale = 0x1p-126f;

MPK_FN int64_t scales_of(int64_t elements) { return (elements + kQuantized - 1) / kQuantized; }

// A code is a whole number, as a float (or a vector of them).
template <Sign sign, class F>
MPK_FN F decode(F code, float scale) {
  if constexpr (sign == Sign::any) {
    const F root = code * (1 / 127.0f);  // exactly 1 for 127
    return scale * (root * absolute(root));
  } else {
    const F root = (code + 128.0f) * (1 / 255.0f);
    const F value = scale * (root * root);
    return value * value;
  }
}

// What is coded of a value, and what scales are the largest of.
template <Sign sign, class F>
MPK_FN F coded_number(F value) {
  if constexpr (sign == Sign::any)
    return value;
  else
    return SquareRoot<F>::of(value);
}

// largest: magnitude among the coded numbers of a block.
MPK_FN float scale_of(float largest) { return largest < kSmallestScale ? 0.0f : largest; }

MPK_FN float inverse_of(float scale) { return scale == 0 ? 0.0f : 1 / scale; }

// The last byte of the result is the code. NaN becomes 0: it is not larger than any number.
template <Sign sign, class F, class U = Bits<F>>
MPK_FN U encode(F number, float inverse) {
  if constexpr (sign == Sign::any) {
    const F steps = larger(SquareRoot<F>::of(absolute(number) * inverse) * 127.0f, F{});
    const U sign_bit = bit_cast<U>(number) & 0x80000000u;
    return bit_cast<U>(bit_cast<F>(bit_cast<U>(steps) | sign_bit) + kIntegers);
  } else {
    const F steps = larger(SquareRoot<F>::of(number * inverse) * 255.0f, F{} + 1.0f);
    return bit_cast<U>((number > 0.0f ? steps : F{}) + (kIntegers - 128.0f));
  }
}

}  // namespace mpk
