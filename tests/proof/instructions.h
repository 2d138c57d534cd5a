// PTX's instructions on the CPU: their results are off by as much as the PTX ISA allows (its sections on ex2, rcp and
// rsqrt: 2, 1 and 2 units in the last place), up, down or at random. Conversions are exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#define __builtin_assume(condition)

enum class Error { up, down, random, none };
inline constexpr Error kErrors[] = {Error::up, Error::down, Error::random};
inline Error error_of_ex2 = Error::up, error_of_rcp = Error::up, error_of_rsqrt = Error::up;

inline float off_by(Error error, double exact, double units) {
  static std::minstd_rand generator(0);
  static std::uniform_real_distribution<double> any(-1, 1);
  const double share = error == Error::up ? 1 : error == Error::down ? -1 : error == Error::none ? 0 : any(generator);
  const float near = static_cast<float>(exact);
  if (exact == 0 || !std::isfinite(near)) return near;
  const double unit = std::ldexp(1.0, std::ilogb(exact) - 23);
  const double off = exact + share * units * unit;
  // Rounding may leave what is allowed: then the next number towards the exact one is furthest off.
  const float rounded = static_cast<float>(off);
  const bool is_beyond = std::abs(rounded - exact) > units * unit;
  return is_beyond ? std::nextafterf(rounded, near) : rounded;
}

inline float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float ex2_approx_ftz_f32(float x) {
  return flushed(off_by(error_of_ex2, std::exp2(static_cast<double>(flushed(x))), 2));
}
inline float rcp_approx_ftz_f32(float x) {
  return flushed(off_by(error_of_rcp, 1 / static_cast<double>(flushed(x)), 1));
}
inline float rsqrt_approx_ftz_f32(float x) {
  return flushed(off_by(error_of_rsqrt, 1 / std::sqrt(static_cast<double>(flushed(x))), 2));
}

// Rounds to the nearest number with `bits` bits behind the point, ties to even. Numbers have fewer bits below the
// exponent `least`, and become infinite beyond `most`.
inline float rounded_to(float x, int bits, int least, float most) {
  if (!std::isfinite(x) || x == 0) return x;
  const int exponent = std::max(std::ilogb(x), least);
  const float near = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), bits - exponent)), exponent - bits);
  return std::abs(near) > most ? std::copysign(INFINITY, x) : std::copysign(near, x);
}

inline uint16_t cvt_rn_bf16_f32(float x) {
  const float near = rounded_to(x, 7, -126, 0x1.fep127f);
  uint32_t bits;
  memcpy(&bits, &near, sizeof bits);
  return std::isnan(x) ? 0x7fff : bits >> 16;
}
inline uint16_t cvt_rn_f16_f32(float x) {
  if (std::isnan(x)) return 0x7fff;
  const float near = rounded_to(x, 10, -14, 65504);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0, magnitude = [&]() -> uint16_t {
    if (std::isinf(near)) return 0x7c00;
    const int exponent = near == 0 ? -15 : std::max(std::ilogb(near), -15);
    if (exponent == -15) return static_cast<uint16_t>(std::abs(near) * 0x1p24f);
    return static_cast<uint16_t>((exponent + 14) * 1024 + std::ldexp(std::abs(near), 10 - exponent));
  }();
  return sign | magnitude;
}
inline float cvt_f32_f16(uint16_t x) {
  const int exponent = x >> 10 & 31, digits = x & 1023;
  const float magnitude = exponent == 31  ? (digits ? NAN : INFINITY)
                          : exponent == 0 ? digits * 0x1p-24f
                                          : std::ldexp(1024.0f + digits, exponent - 25);
  return x >> 15 ? -magnitude : magnitude;
}
