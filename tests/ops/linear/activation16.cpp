// Rounds the activations and slopes that a GPU computes from 16-bit numbers, and those of a gated pair, to 16 bits, and
// compares them with formulas in long double: at each number of both formats, though the GPU's instructions err. If a
// result is further off than its format's bounds allow, prints a line, and exits with 1.
#include <cstdio>
#include <vector>

#include "common/cuda.h"
#include "linear/linear_gated.h"

using namespace mpk;
using Exact = long double;

struct Pair {
  Exact forward, slope;
};

static Exact sigmoid(Exact z) { return 1 / (1 + expl(-z)); }
static Exact times(Exact z, Exact factor) { return factor == 0 ? 0 : z * factor; }  // where z is inf in long double

// The slope is computed from z or, where it follows from y, from y.
static Pair exact(Activation activation, Exact z, Exact y) {
  const Exact linear = 2 * sqrtl(2 / acosl(-1)), cubic = linear * 0.044715L, u = z * (linear + cubic * z * z);
  const Exact integral = erfcl(-z / sqrtl(2)) / 2, density = expl(-z * z / 2) / sqrtl(2 * acosl(-1));
  switch (activation) {
    case Activation::relu:
      return {z <= 0 ? 0 : z, y <= 0 ? 0.0L : 1.0L};
    case Activation::relu2:
      return {z <= 0 ? 0 : z * z, z <= 0 ? 0 : 2 * z};
    case Activation::gelu:
      return {z * integral, integral + z * density};
    case Activation::gelu_tanh:
      return {z * sigmoid(u), sigmoid(u) + times(z * (linear + 3 * cubic * z * z), sigmoid(u) * sigmoid(-u))};
    case Activation::silu:
      return {z * sigmoid(z), sigmoid(z) * (1 + times(z, sigmoid(-z)))};
    case Activation::sigmoid:
      return {sigmoid(z), y * (1 - y)};
    case Activation::tanh:
      return {tanhl(z), 1 - y * y};
    default:
      return {z, 1};
  }
}

// What a format's results may be: how many aren't the nearest number, and by how many units in the last place.
struct Bounds {
  int misrounded;
  Exact forward, slope;
};
template <class T>
struct Format;
template <>
struct Format<fp16> {
  static constexpr const char* kName = "fp16";
  static constexpr int kDigits = 10, kLeast = -14;  // behind the point; the least exponent
  static constexpr Bounds kBounds{20, 0.502L, 0.75L};
};
template <>
struct Format<bf16> {
  static constexpr const char* kName = "bf16";
  static constexpr int kDigits = 7, kLeast = -126;
  static constexpr Bounds kBounds{3, 0.501L, 0.501L};  // as many as with Fp32Math
};

template <class T>
static float rounded(float wide) {
  T narrowed;
  narrow(wide, narrowed);
  return widen(narrowed);
}

// The results of one formula at all numbers.
template <class T>
struct Tally {
  int misrounded = 0;
  Exact worst = 0;
  float at = 0;
  // Results below 1e-35 of scale may be 0, because their factors are subnormal in fp32. `slack` of scale doesn't count:
  // where a slope crosses 0, its summands are rounded at their own size.
  void add(float z, float wide, Exact want, Exact scale = 1, Exact slack = 0) {
    scale = std::abs(scale);
    if (std::abs(want) < 1e-35L * scale && std::abs(wide) < 1e-35L * scale) return;
    const int exponent = std::max(want == 0 ? Format<T>::kLeast : ilogbl(want), Format<T>::kLeast);
    const Exact unit = ldexpl(1, exponent - Format<T>::kDigits);
    const float got = rounded<T>(wide), nearest = rounded<T>(static_cast<float>(want));
    const Exact off = std::isfinite(got) ? (std::abs(got - want) - slack * scale) / unit
                      : got == nearest   ? 0
                                         : INFINITY;
    misrounded += off > 0.5L;
    if (off > worst) worst = off, at = z;
  }
  bool is_within(Activation activation, const char* of, int most_misrounded, Exact most) const {
    if (misrounded <= most_misrounded && worst <= most) return true;
    printf("%s %s, %s: %d misrounded, off by %.4Lf at %.9g\n", Format<T>::kName,
           kActivationNames[static_cast<int>(activation)], of, misrounded, worst, at);
    return false;
  }
};

static int kind(float x) { return std::isnan(x) ? 2 : std::isinf(x) ? (x > 0 ? 1 : -1) : 0; }

template <class T>
class Check {
 public:
  explicit Check(Activation activation) : activation_(activation) {
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
      numbers_.push_back(widen(T{static_cast<uint16_t>(bits)}));
      exact_.push_back(exact(activation, numbers_.back(), numbers_.back()));
    }
  }

  bool of_one() const {
    Tally<T> forward, slope;
    bool is_right = true;
    with_activation<HalfMath>(activation_, [&](auto formula) {
      for (size_t i = 0; i < numbers_.size(); ++i) {
        const float z = numbers_[i], y = formula.forward(z), dz = formula.backward(1.0f, z);
        if (std::isfinite(z)) {
          forward.add(z, y, exact_[i].forward);
          slope.add(z, dz, exact_[i].slope);
        }
        if (std::signbit(y) != std::signbit(exact_[i].forward) && z == 0) is_right = report(z, y, exact_[i].forward);
        if (!std::isfinite(z)) is_right &= is_as_in_fp32(z, y, dz);
      }
    });
    constexpr Bounds bounds = Format<T>::kBounds;
    is_right &= forward.is_within(activation_, "forward", bounds.misrounded, bounds.forward);
    return slope.is_within(activation_, "slope", 1 << 16, bounds.slope) && is_right;
  }

  bool of_gated_pair(float dh, float up) const {
    dh = rounded<T>(dh), up = rounded<T>(up);
    Tally<T> h, dgate, dup;
    with_activation<HalfMath>(activation_, [&](auto formula) {
      for (size_t i = 0; i < numbers_.size(); ++i) {
        const float z = numbers_[i];
        if (!std::isfinite(z)) continue;
        const auto made = Gated<decltype(formula)>::backward(dh, z, up);
        const Exact wide_dh = dh, wide_up = up;
        h.add(z, made.h, exact_[i].forward * wide_up, wide_up);
        h.add(z, Gated<decltype(formula)>::forward(z, up), exact_[i].forward * wide_up, wide_up);
        dgate.add(z, made.gate, exact_[i].slope * wide_dh * wide_up, wide_dh * wide_up, 0x1p-23L);
        dup.add(z, made.up, exact_[i].forward * wide_dh, wide_dh);
      }
    });
    constexpr Bounds bounds = Format<T>::kBounds;
    const bool h_is_right = h.is_within(activation_, "h", 1 << 16, bounds.forward);
    const bool dup_is_right = dup.is_within(activation_, "dup", 1 << 16, bounds.forward);
    return dgate.is_within(activation_, "dgate", 1 << 16, bounds.forward) && h_is_right && dup_is_right;
  }

 private:
  bool is_as_in_fp32(float z, float y, float dz) const {
    return with_activation<Fp32Math>(activation_, [&](auto formula) {
      const float wanted = formula.forward(z), slope = formula.backward(1.0f, z);
      return kind(y) == kind(wanted) ? kind(dz) == kind(slope) || report(z, dz, slope) : report(z, y, wanted);
    });
  }
  bool report(float z, float got, float wanted) const {
    printf("%s at %g: %g, not %g\n", kActivationNames[static_cast<int>(activation_)], z, got, wanted);
    return false;
  }

  Activation activation_;
  std::vector<float> numbers_;
  std::vector<Pair> exact_;
};

template <class T>
static bool all_are_right(Activation activation) {
  const Check<T> check(activation);
  const bool is_gate = activation == Activation::relu || activation == Activation::gelu ||
                       activation == Activation::gelu_tanh || activation == Activation::silu;
  bool is_right = true;
  for (const Error ex2 : kErrors) {
    for (const Error rcp : kErrors) {
      error_of_ex2 = ex2, error_of_rcp = rcp;
      is_right &= check.of_one();
      if (!is_gate) continue;
      for (const auto& [dh, up] : {std::pair(1.0f, 3.3f), std::pair(-0.7f, 0.011f), std::pair(0.3f, -250.0f)})
        is_right &= check.of_gated_pair(dh, up);
    }
  }
  return is_right;
}

int main() {
  bool is_right = true;
  for (int i = 0; i < static_cast<int>(std::size(kActivationNames)); ++i)
    is_right &= all_are_right<fp16>(Activation(i)) & all_are_right<bf16>(Activation(i));
  return is_right ? 0 : 1;
}
