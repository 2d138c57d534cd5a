// A master weight in two halves: the 16-bit weight that the model uses, and a 16-bit remainder. No second copy of the
// weight is stored. The functions take float or vectors of floats, and have no branches.
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
//
// If somebody writes to a weight, its remainder still belongs to the old weight. Most often some master has these two
// halves, and rounds to the new weight. Four cases have no such master, and the weight alone is it: remainders that
// lead beyond 0, or beyond inf; in fp16, sums that fp32 can't hold, and remainders that are too large below a power of
// two, where numbers lie half as far apart.
#pragma once

#include "common/numeric.h"

namespace mpk {

template <class U, class Half = U>
struct Split {
  Half weight;  // 16 bits: a vector of halves, or in the low half of a word
  U remainder;  // 16 bits, in the low half of each word
};

// is_number: whether a NaN, which would round to inf, is out of the question.
template <class U, bool is_number = false>
MPK_FN Split<U> split_bf16(U master) {
  if constexpr (!is_number) master = IsNan<U>::of(master) ? (master & 0xffff0000u) | 0x400000u : master;
  return {(master + 0x8000u) >> 16, master & 0xffffu};
}

template <class U>
MPK_FN U magnitude_of(U bits) {
  return bits & 0x7fffffffu;
}

// A joined master beyond 0 or beyond inf has the bits of a NaN.
template <class U, bool is_number = false>
MPK_FN U join_bf16(const Split<U>& split) {
  const U weight = split.weight << 16;
  const U joined = weight + ((split.remainder ^ 0x8000u) - 0x8000u);  // the remainder's sign, carried through
  if constexpr (is_number) return joined;
  return IsNan<U>::of(joined) ? weight : joined;
}

template <class U>
MPK_FN U unless_beyond_zero(U joined, U weight) {
  return (joined ^ weight) < 0x80000000u ? joined : weight;
}

// Returns a 2^-16th of the last place of an fp16, with the fp16's sign. Both are the bits of fp32 numbers.
template <class U>
MPK_FN U unit_of_fp16(U weight) {
  const U exponent = larger(weight & 0x7f800000u, U{} + (113u << 23));
  return (exponent - (26u << 23)) | (weight & 0x80000000u);
}

inline constexpr float kIntegers = 12582912.0f;  // 1.5 * 2^23: adding it rounds a float to an integer, in the low bits
inline constexpr uint32_t kIntegersBits = 0x4b400000u;

template <class F>
using SplitFp16 = Split<Bits<F>, typename Fp16<F>::Half>;

template <class F, class U = Bits<F>>
MPK_FN U join_fp16(const SplitFp16<F>& split) {
  const U weight = Fp16<F>::widen(split.weight);
  const F remainder = bit_cast<F>((split.remainder ^ 0x8000u) - 0x8000u + kIntegersBits) - kIntegers;
  const F beyond = remainder * bit_cast<F>(unit_of_fp16(weight)), joined = bit_cast<F>(weight) + beyond;
  const auto is_power = (magnitude_of(weight) > 0x38800000u) & ((weight & 0x7fffffu) == 0u);
  const auto is_anothers = (joined - bit_cast<F>(weight) != beyond) | (is_power & (remainder < -16384.0f));
  const auto is_alone = ((weight & 0x7f800000u) == 0x7f800000u) | is_anothers;
  return is_alone ? weight : unless_beyond_zero(bit_cast<U>(joined), weight);
}

template <class F, class U = Bits<F>>
MPK_FN SplitFp16<F> split_fp16(Bits<F> master) {
  const auto is_infinite = (master & 0x7fffffffu) == 0x7f800000u;
  // The last bit lifts a tie above itself, so that the tie rounds away from zero.
  const auto weight = Fp16<F>::narrow(is_infinite ? master : master | 1u);
  const U nearest = Fp16<F>::widen(weight);
  const F units_in_one = bit_cast<F>((254u << 23) - unit_of_fp16(nearest));
  const F units = (bit_cast<F>(master) - bit_cast<F>(nearest)) * units_in_one;
  const F most = F{} + 32767.0f;  // a subnormal may come closer to the tie than that, and would be rounded up to it
  const U remainder = bit_cast<U>((units > most ? most : units) + kIntegers) - kIntegersBits;
  return {weight, (nearest & 0x7f800000u) == 0x7f800000u ? U{} : remainder & 0xffffu};
}

// The other way to keep a master is a whole copy beside the weight. If the copy doesn't round to the weight, somebody
// has written to the weight, and the weight becomes the master. Bits are compared, so that neither NaN nor a subnormal
// that the CPU takes for 0 matters. `written` is the 16-bit weight, widened.
template <class F, class U = Bits<F>>
MPK_FN F copied_master(Dtype dtype, F copy, F written) {
  const U bits = bit_cast<U>(copy);
  const U rounded =
      dtype == Dtype::b16 ? fp32_bits_of_bf16(bf16_bits_of_fp32(bits)) : U(Fp16<F>::widen(Fp16<F>::narrow(bits)));
  return bit_cast<F>(rounded == bit_cast<U>(written) ? bits : bit_cast<U>(written));
}

}  // namespace mpk
