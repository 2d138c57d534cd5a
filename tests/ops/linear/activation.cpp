// Every activation beside its formula in fp64, over fp32 values of every magnitude. Exit status 1, and a line that says
// where, if one is further off than its bound.
#include "linear/activation.h"

#include <cstdio>

#include "common/simd.h"

using namespace mpk;
using MPK_ISA::Floats;

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

int main() {
  // The relative error of y in eps; what the sigmoid form of tanh-GELU loses to a rounded exponent grows with it.
  const std::pair<Activation, double> bounds[] = {{Activation::gelu, MPK_GELU_BOUND},
                                                  {Activation::gelu_tanh, 120},
                                                  {Activation::silu, 8},
                                                  {Activation::sigmoid, 3},
                                                  {Activation::tanh, 3}};
  const double eps = 0x1p-23, negligible = 1e-35;  // below it subnormals begin, and y is 0
  for (const auto& [activation, bound] : bounds) {
    for (uint64_t first = 0; first < uint64_t{1} << 32; first += 4099 * MPK_ISA::kLanes) {
      Floats z, y, dz;
      for (int lane = 0; lane < MPK_ISA::kLanes; ++lane)
        z[lane] = bit_cast<float>(static_cast<uint32_t>(first + 4099 * lane));
      with_activation(activation, [&](auto it) {
        y = it.forward(z);
        dz = it.backward(Floats{} + 1.0f, decltype(it)::kSaves == Saves::y ? y : z);
      });
      for (int lane = 0; lane < MPK_ISA::kLanes; ++lane) {
        const auto [forward, backward] = exact(activation, z[lane], y[lane]);
        if (!std::isfinite(z[lane])) continue;
        if (std::abs(y[lane] - forward) <= bound * eps * std::abs(forward) + negligible &&
            std::abs(dz[lane] - backward) <= 6 * eps)
          continue;
        printf("%s(%.9g) = %.9g, not %.9g; slope %.9g, not %.9g\n", kActivationNames[static_cast<int>(activation)],
               z[lane], y[lane], forward, dz[lane], backward);
        return 1;
      }
    }
  }
  return 0;
}
