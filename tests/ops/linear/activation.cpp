// Compares every activation with its formula in fp64, at fp32 numbers of every magnitude. If an error exceeds its
// bound, prints a line that says where, and exits with 1. With __CUDA_ARCH__, formulas and errors are a GPU's.
#include "linear/activation.h"

#include <cstdio>

#ifdef __CUDA_ARCH__
using Floats = float;
constexpr int kLanes = 1;
#else
#include "common/simd.h"
using mpk::MPK_ISA::Floats;
constexpr int kLanes = mpk::MPK_ISA::kLanes;
#endif
static float& lane_of(Floats& vector, int lane) { return reinterpret_cast<float*>(&vector)[lane]; }

using namespace mpk;

struct Exact {
  double forward, backward;
};

static double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

static Exact exact(Activation activation, double z, double y) {
  const double phi = std::exp(-z * z / 2) / std::sqrt(2 * M_PI), integral = std::erfc(-z / std::sqrt(2.0)) / 2;
  const double linear = 2 * std::sqrt(2 / M_PI), cubic = linear * 0.044715, u = z * (linear + cubic * z * z);
  switch (activation) {
    case Activation::gelu:
      return {z * integral, integral + z * phi};
    case Activation::gelu_tanh: {
      const double slope = sigmoid(u) * sigmoid(-u);
      return {z * sigmoid(u), sigmoid(u) + (slope == 0 ? 0 : z * slope * (linear + 3 * cubic * z * z))};
    }
    case Activation::silu:
      return {z * sigmoid(z), sigmoid(z) * (1 + z * sigmoid(-z))};
    case Activation::sigmoid:
      return {sigmoid(z), y * (1 - y)};
    default:
      return {std::tanh(z), 1 - y * y};
  }
}

// The bounds on y's relative errors, in eps. In tanh-GELU, which is a sigmoid, a large exponent has a large rounding.
static const std::pair<Activation, double> kBounds[] = {{Activation::gelu, MPK_GELU_BOUND},
                                                        {Activation::gelu_tanh, 120},
                                                        {Activation::silu, 8},
                                                        {Activation::sigmoid, MPK_SIGMOID_BOUND},
                                                        {Activation::tanh, MPK_TANH_BOUND}};

static bool all_are_near() {
  const double eps = 0x1p-23, negligible = 1e-35;  // below it subnormals begin, and y is 0
  for (const auto& [activation, bound] : kBounds) {
    for (uint64_t first = 0; first < uint64_t{1} << 32; first += 4099 * kLanes) {
      Floats z, y, dz;
      for (int lane = 0; lane < kLanes; ++lane)
        lane_of(z, lane) = bit_cast<float>(static_cast<uint32_t>(first + 4099 * lane));
      with_activation(activation, [&](auto formula) {
        y = formula.forward(z);
        dz = formula.backward(Floats{} + 1.0f, decltype(formula)::kSaves == Saves::y ? y : z);
      });
      for (int lane = 0; lane < kLanes; ++lane) {
        const float at = lane_of(z, lane), got = lane_of(y, lane), slope = lane_of(dz, lane);
        const auto [forward, backward] = exact(activation, at, got);
        if (!std::isfinite(at)) continue;
        if (std::abs(got - forward) <= bound * eps * std::abs(forward) + negligible &&
            std::abs(slope - backward) <= 6 * eps)
          continue;
        printf("%s(%.9g) = %.9g, not %.9g; slope %.9g, not %.9g\n", kActivationNames[static_cast<int>(activation)], at,
               got, forward, slope, backward);
        return false;
      }
    }
  }
  return true;
}

int main() {
#ifdef __CUDA_ARCH__
  for (const Error ex2 : kErrors) {
    for (const Error rcp : kErrors) {
      error_of_ex2 = ex2, error_of_rcp = rcp;
      if (!all_are_near()) return 1;
    }
  }
  return 0;
#else
  return all_are_near() ? 0 : 1;
#endif
}
