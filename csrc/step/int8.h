// States in 8 bits: codes, and one fp32 scale for each block of kQuantized codes. The scale is the block's largest
// magnitude. A code counts steps of the value's root, which are finer for small values.
//
// Sign::any (exp_avg): the value is scale * (q / 127)^2 with q's sign, q in -127 .. 127. Its error is at most scale *
// (1/127 + 1/254^2).
//
// Sign::not_negative (exp_avg_sq): the value's root is coded, as scale * (q / 255)^2, q in 0 .. 255, stored as q - 128.
// The root's error is at most scale * (1/255 + 1/510^2). The root is 0 only if the value is 0, or would be as an fp32:
// otherwise an update that is divided by the root would explode.
//
// Encoding a decoded value gives the same code, so a checkpoint in fp32 loses nothing. One exception: exp_avg_sq's
// values can be subnormal if the scale of their roots is below 2^-47. If a block holds an inf or NaN, all its values
// may become inf or NaN. If its scale is below 2^-126, all become 0.
#pragma once

#include "step/split.h"

namespace mpk {

// Which signs a state's values may have: not_negative excludes -0, too. This decides how they are coded.
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

// Returns the number that is coded for a value. A scale is the largest magnitude of such numbers.
template <Sign sign, class F>
MPK_FN F coded_number(F value) {
  if constexpr (sign == Sign::any)
    return value;
  else
    return SquareRoot<F>::of(value);
}

// The magnitude of a coded number, as an integer (see magnitude).
template <Sign sign, class F, class U = Bits<F>>
MPK_FN U coded_magnitude(F number) {
  return sign == Sign::any ? magnitude(number) : bit_cast<U>(number);
}

// largest: the largest magnitude among a block's coded numbers.
MPK_FN float scale_of(float largest) { return largest < kSmallestScale ? 0.0f : largest; }

MPK_FN float inverse_of(float scale) { return scale == 0 ? 0.0f : 1 / scale; }

// The last byte of the result is the code. NaN becomes 0, because NaN is not larger than any number.
template <Sign sign, class Root, class F, class U = Bits<F>>
MPK_FN U encode(F number, float inverse) {
  if constexpr (sign == Sign::any) {
    const F steps = larger(Root::of(absolute(number) * inverse) * 127.0f, F{});
    const U sign_bit = bit_cast<U>(number) & 0x80000000u;
    return bit_cast<U>(bit_cast<F>(bit_cast<U>(steps) | sign_bit) + kIntegers);
  } else {
    const F steps = larger(Root::of(number * inverse) * 255.0f, F{} + 1.0f);
    return bit_cast<U>((number > 0.0f ? steps : F{}) + (kIntegers - 128.0f));
  }
}

}  // namespace mpk
