// A master weight in two halves: the 16-bit weight that the model uses, and a 16-bit remainder. No second copy of the
// weight is stored. Written over float and over vectors of it, in integers, without a branch.
//
// bf16: the weight is the master's upper half, rounded to nearest, ties away from zero; the remainder is the lower
// half, as a signed number. Every master but NaN comes back bit for bit. (Ties to even would need a 17th bit: an even
// bf16 has 65,537 masters.)
//
// fp16: the weight is rounded likewise; the remainder counts 2^-16ths of the weight's last place. Masters of
// 2^-14 <= |x| < 65520 come back bit for bit, smaller ones to within 2^-40; 65520 and more become inf, as the weight
// does.
//
// NaN stays NaN, with its sign, in both; its payload may change.
#pragma once

#include "common/numeric.h"

namespace mpk {

template <class U>
struct Split {
  U weight;     // 16 bits, in the low half of each word
  U remainder;  // 16 bits, likewise
};

template <class U>
MPK_FN Split<U> split_bf16(U master) {
  const U zero = master & 0u;
  const U weight = (master + 0x8000u) >> 16;
  const U quiet_nan = master >> 16 | 0x40u;
  const auto is_nan = (master & 0x7fffffffu) > 0x7f800000u;
  return {is_nan ? quiet_nan : weight, is_nan ? zero : master & 0xffffu};
}

template <class U>
MPK_FN U join_bf16(const Split<U>& split) {
  const U extended = (split.remainder ^ 0x8000u) - 0x8000u;  // the remainder's sign, carried through
  return (split.weight << 16) + extended;
}

// A 2^-16th of the last place of an fp16, as fp32 bits.
template <class U>
MPK_FN U unit_of_fp16(U weight) {
  const U exponent = weight >> 10 & 0x1fu;
  return ((exponent == 0u ? exponent + 1u : exponent) + 86u) << 23;
}

inline constexpr float kIntegers = 12582912.0f;  // 1.5 * 2^23: a float beside it is an integer, in its low bits
inline constexpr uint32_t kIntegersBits = 0x4b400000u;

template <class F, class U = Bits<F>>
MPK_FN U join_fp16(const Split<Bits<F>>& split) {
  const U weight = Fp16<F>::widen(split.weight);
  const F remainder = bit_cast<F>((split.remainder ^ 0x8000u) - 0x8000u + kIntegersBits) - kIntegers;
  const F magnitude = bit_cast<F>(weight & 0x7fffffffu) + remainder * bit_cast<F>(unit_of_fp16<U>(split.weight));
  const U joined = bit_cast<U>(magnitude) | (weight & 0x80000000u);
  return (weight & 0x7f800000u) == 0x7f800000u ? weight : joined;
}

template <class F, class U = Bits<F>>
MPK_FN F units_beyond_fp16(Bits<F> weight, F magnitude) {
  const F units_in_one = bit_cast<F>((254u << 23) - unit_of_fp16<U>(weight));
  return (magnitude - bit_cast<F>(Fp16<F>::widen(weight & 0x7fffu))) * units_in_one;
}

template <class F, class U = Bits<F>>
MPK_FN Split<U> split_fp16(Bits<F> master) {
  const F magnitude = bit_cast<F>(master & 0x7fffffffu);
  const U nearest = Fp16<F>::narrow(master);
  // A tie that went to the even weight below it would leave a remainder of 32768, one more than fits.
  const U weight = units_beyond_fp16<F>(nearest, magnitude) >= 32768.0f ? nearest + 1u : nearest;
  const U rounded = bit_cast<U>(units_beyond_fp16<F>(weight, magnitude) + kIntegers) - kIntegersBits;
  const U remainder = rounded == 32768u ? rounded - 1u : rounded & 0xffffu;
  return {weight, (weight & 0x7c00u) == 0x7c00u ? weight & 0u : remainder};
}

}  // namespace mpk
