// Compares csrc/step/unchecked.h with roots and quotients of C++, which are the nearest, and with what rules make of
// them. The chip's instructions are off by as much as PTX allows. Arguments: each how manieth significand is tried, and
// how many elements of each rule. At the first difference, prints a line and exits with 1.
#include "step/unchecked.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "step/rules/adam.h"
#include "step/rules/lion.h"
#include "step/rules/sgd.h"
#include "step/step.h"

using namespace mpk;

static uint32_t bits_of(float x) { return bit_cast<uint32_t>(x); }
static float float_of(uint32_t bits) { return bit_cast<float>(bits); }

[[noreturn]] static void fail(const char* what, float x, float y, float got, float want) {
  printf("%s of %a, %a: %a, not %a\n", what, x, y, got, want);
  exit(1);
}

static void expect(const char* what, float x, float y, float got, float want) {
  if (bits_of(got) != bits_of(want) && !(std::isnan(got) && std::isnan(want))) fail(what, x, y, got, want);
}

// Calls body(near) for each float that is off from `exact` by so many units in the last place, or less.
template <class Body>
static void for_each_near(double exact, int units, const Body& body) {
  const double bound = std::ldexp(units, std::ilogb(exact) - 23);
  for (int i = -2 * units; i <= 2 * units; ++i) {  // below a power of two, floats lie half as far apart
    const float near = float_of(bits_of(static_cast<float>(exact)) + i);
    if (std::abs(near - exact) <= bound) body(near);
  }
}

// Starts within PTX's bounds that lead past the nearest number. nvcc's own root and quotient have the same.
static std::multiset<uint32_t> missed_roots;
static int missed_quotients = 0;

static uint32_t shifted(float x) { return bits_of(x < 1 ? x * 0x1p64f : x) & 0xffffff; }  // all x 4^i are alike

static void check_roots(uint32_t every) {
  for (uint32_t bits = 0x3f800000; bits < 0x40800000; ++bits) {  // 1 <= x < 4
    const float x = float_of(bits);
    for_each_near(1 / std::sqrt(double{x}), 2, [&](float near) {
      if (NearRoot::of(x, near) != std::sqrt(x)) missed_roots.insert(shifted(x));
    });
  }
  for (const Error error : kErrors) {
    error_of_rsqrt = error;
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 97 * every) {
      const float x = float_of(static_cast<uint32_t>(bits)), root = SquareRoot<Unchecked>::of(x).value;
      if (!missed_roots.count(shifted(x))) expect("root", x, 0, root, x < 0x1p64f ? std::sqrt(x) : NAN);
    }
  }
}

template <Sign sign>
static void check_code(float share) {
  const uint32_t got = encode<sign, NearRoot>(share, 1.0f), want = encode<sign, SquareRoot<float>>(share, 1.0f);
  expect("code", share, 0, static_cast<uint8_t>(got), static_cast<uint8_t>(want));
}

static void check_codes(uint32_t every) {
  for (const Error error : kErrors) {
    error_of_rsqrt = error;
    for (uint32_t bits = 0; bits <= bits_of(1.0001f); bits += 37 * every) {
      check_code<Sign::any>(float_of(bits));
      check_code<Sign::any>(-float_of(bits));
      check_code<Sign::not_negative>(float_of(bits));
    }
    for (const float share : {1.0f, 0x1p-149f, 0x1p-126f, float_of(bits_of(1.0f) + 1), NAN, -NAN}) {
      check_code<Sign::any>(share);
      check_code<Sign::not_negative>(share);
    }
  }
}

// The quotient before its last rounding is off by less than 1.5 * 2^-23 units in the last place. So only those
// quotients may be rounded wrongly that lie so near to a midpoint m of floats: where a - m b, in the last place of
// both, is 12 at most. For each b these are few, and all are tried.
static void check_quotients(uint32_t every) {
  for (uint64_t b = 1 << 23; b < 1 << 24; b += b + every < 1 << 24 ? every : 1) {
    const float divisor = std::ldexp(static_cast<float>(b), -23);
    const int zeros = __builtin_ctzll(b);
    uint64_t inverse = b >> zeros;  // modulo 2^64, by Newton's iteration
    for (int i = 0; i < 5; ++i) inverse *= 2 - (b >> zeros) * inverse;
    for (int shift = 24; shift <= 25; ++shift) {
      const uint64_t modulus = uint64_t{1} << (shift - zeros);
      for (int64_t apart = -12; apart <= 12; ++apart) {  // a 2^shift = odd b + apart, where odd / 2 is a midpoint
        if (apart == 0 || apart % (1 << zeros) != 0) continue;
        uint64_t odd = static_cast<uint64_t>(-apart / (1 << zeros)) * inverse % modulus;
        if (odd % 2 == 0) continue;
        if (odd < 1 << 24) odd += ((1 << 24) - odd + modulus - 1) / modulus * modulus;
        for (; odd < 1 << 25; odd += modulus) {
          const auto a = static_cast<uint64_t>((static_cast<__int128>(odd) * b + apart) >> shift);
          if (a < 1 << 23 || a >= 1 << 24) continue;
          const float dividend = std::ldexp(static_cast<float>(a), -23), want = dividend / divisor;
          for_each_near(1.0 / divisor, 1,
                        [&](float near) { missed_quotients += nearest_quotient(dividend, divisor, near) != want; });
        }
      }
    }
  }
}

static std::mt19937_64 generator;
static const float kOdd[] = {0,        -0.0f, 0x1p-149f, -0x1p-149f, 1e-38f, 1e-30f, 1e-19f, 1e-15f,
                             INFINITY, 1e19f, 2e19f,     3e38f,      -3e38f, 1,      -1,     NAN};

// A number as steps meet it, a power of two, an odd number, any bits.
static float random_number(int family) {
  const uint64_t random = generator();
  const auto exponent = static_cast<int>(random >> 40 & 31);
  if (family == 0) return std::ldexp(1 + (random & 0x7fffff) * 0x1p-23f, -exponent) * (random >> 60 & 1 ? 1 : -1);
  if (family == 1) return std::ldexp(random >> 60 & 1 ? 1.0f : -1.0f, -4 * exponent) * (random >> 59 & 1);
  if (family == 2) return kOdd[random & 15];
  return float_of(static_cast<uint32_t>(random));
}

static void check_quotient(float a, float b) {
  const float quotient = (Unchecked(a) / b).value;
  if (quotient == quotient) expect("quotient", a, b, quotient, a / b);
}

static void check_ranges(uint64_t elements) {
  for (uint64_t i = 0; i < elements; ++i) {
    error_of_rcp = kErrors[i % 3];
    check_quotient(random_number(3), random_number(3));
  }
  for (int odd = 1; odd < 100; odd += 2) {  // odd * 2^-150, a midpoint, to which 1 / 3, rounded, doesn't lead
    for (const int shift : {60, 100}) check_quotient(std::ldexp(3.0f * odd, shift - 150), std::ldexp(3.0f, shift));
  }
  expect("sign", NAN, 0, sign(Unchecked(NAN)).value, NAN);
  expect("maximum", NAN, 0, maximum(Unchecked(NAN), 0.0f).value, NAN);
  expect("maximum", 0, NAN, maximum(Unchecked(0.0f), NAN).value, NAN);
}

template <class Rule>
static void check_rule(const typename Rule::Hyperparameters& group, bool has_optional, uint64_t elements) {
  for (uint64_t i = 0; i < elements; ++i) {
    const int family = i % 4;
    error_of_rsqrt = Error::none;  // else it would be one of missed_roots once in millions of elements
    error_of_rcp = kErrors[i / 4 % 3];
    const StepScalars<Rule, double> exact{1, Rule::scalars(group, 1 + (generator() & 1023))};
    const auto scalars = rounded<float>(exact).rule;
    float weight = random_number(family), states[Rule::kStates];
    const float grad = random_number(family);
    for_each_index<Rule::kStates>([&](auto k) {
      const auto code =
          static_cast<int8_t>(static_cast<int>(generator() % 255) - (Rule::kSigns[k] == Sign::any ? 127 : 128));
      states[k] = decode<Rule::kSigns[k]>(static_cast<float>(code), scale_of(std::abs(random_number(family))));
    });
    Unchecked weight_unchecked = weight, states_unchecked[Rule::kStates];
    for (int k = 0; k < Rule::kStates; ++k) states_unchecked[k] = states[k];
    Rule::step(weight, grad, states, has_optional, scalars);
    Rule::step(weight_unchecked, Unchecked(grad), states_unchecked, has_optional, scalars);
    bool is_number = weight_unchecked.value == weight_unchecked.value;
    float numbers[Rule::kStates], numbers_unchecked[Rule::kStates];
    for_each_index<Rule::kStates>([&](auto k) {
      numbers[k] = coded_number<Rule::kSigns[k]>(states[k]);
      numbers_unchecked[k] = coded_number<Rule::kSigns[k]>(states_unchecked[k]).value;
      is_number = is_number && numbers_unchecked[k] == numbers_unchecked[k];
    });
    if (family == 0 && !is_number) fail(Rule::kOp, grad, weight, weight_unchecked.value, weight);
    if (!is_number) continue;
    expect(Rule::kOp, grad, 0, weight_unchecked.value, weight);
    for (int k = 0; k < Rule::kStates; ++k) expect(Rule::kOp, grad, k, numbers_unchecked[k], numbers[k]);
  }
}

int main(int, char** arguments) {
  const auto every = static_cast<uint32_t>(atoi(arguments[1]));
  const auto elements = static_cast<uint64_t>(atoll(arguments[2]));
  check_roots(every);
  check_codes(every);
  check_quotients(every);
  if (missed_roots.size() > 12 || missed_quotients > 1) fail("misses", missed_roots.size(), missed_quotients, 13, 12);
  check_ranges(elements);
  for (const bool has_optional : {false, true}) {
    check_rule<Adamw>({1e-3, 0.9, 0.999, 0.01, 1e-8}, has_optional, elements);
    check_rule<Adam>({1e-3, 0.9, 0.999, 0.01, 1e-8, 0}, has_optional, elements);
    check_rule<Sgd>({0.1, 0.01, 0.9, 0.1, 1}, has_optional, elements);
    check_rule<Lion>({1e-4, 0.9, 0.99, 0.1}, has_optional, elements);
  }
  for (int zero = 0; zero < 2; ++zero) {  // of an untouched weight, which no mark may make slow
    float states[3] = {}, weight = 1;
    Unchecked states_unchecked[3] = {}, weight_unchecked = 1.0f;
    const auto scalars =
        rounded<float>(StepScalars<Adamw, double>{1, Adamw::scalars({1e-3, 0.9, 0.999, 0, 1e-8}, 1)}).rule;
    Adamw::step(weight, zero ? -0.0f : 0.0f, states, false, scalars);
    Adamw::step(weight_unchecked, Unchecked(zero ? -0.0f : 0.0f), states_unchecked, false, scalars);
    expect("no grad", 0, 0, weight_unchecked.value, weight);
  }
}
