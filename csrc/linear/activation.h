// The activations of linear_act: forward computes y from z; backward computes dz from dy and from what was saved, z or
// y. NaN stays NaN. The formulas are those of mpkernels/ops/linear/activations.py; Math (common/math.h) has the
// functions that they consist of.
#pragma once

#include "common/math.h"

namespace mpk {

enum class Saves { nothing, z, y };

struct Identity {
  static constexpr Saves kSaves = Saves::nothing;
  template <class F>
  static MPK_FN F forward(F z) {
    return z;
  }
  template <class F>
  static MPK_FN F backward(F dy, F) {
    return dy;
  }
};

struct Relu {
  static constexpr Saves kSaves = Saves::y;
  template <class F>
  static MPK_FN F forward(F z) {
    return z <= 0.0f ? F{} : z;
  }
  template <class F>
  static MPK_FN F backward(F dy, F y) {
    return y <= 0.0f ? F{} : dy;
  }
};

struct Relu2 {
  static constexpr Saves kSaves = Saves::z;
  template <class F>
  static MPK_FN F forward(F z) {
    return z <= 0.0f ? F{} : z * z;
  }
  template <class F>
  static MPK_FN F backward(F dy, F z) {
    return z <= 0.0f ? F{} : 2.0f * z * dy;
  }
};

template <class Math>
struct Gelu {
  static constexpr Saves kSaves = Saves::z;
  template <class F>
  static MPK_FN F forward(F z) {
    return z * Math::normal(z).integral;
  }
  template <class F>
  static MPK_FN F backward(F dy, F z) {
    const Normal<F> at = Math::normal(z);
    return dy * fused(z, at.density, at.integral);
  }
};

template <class Math>
struct GeluTanh {
  static constexpr Saves kSaves = Saves::z;
  static constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;  // 2 sqrt(2 / pi), and 0.044715 times that
  // The bound keeps z^2 from being inf, which times the 0 of a saturated sigmoid would be NaN.
  template <class F>
  static MPK_FN F bounded_square(F z) {
    const F square = z * z;
    return square > 1e30f ? F{} + 1e30f : square;
  }
  template <class F>
  static MPK_FN F forward(F z) {
    return z * Math::logistic(z * fused(bounded_square(z), kCubic, kLinear)).of_z;
  }
  template <class F>
  static MPK_FN F backward(F dy, F z) {
    const F square = bounded_square(z);
    const Logistic<F> s = Math::logistic(z * fused(square, kCubic, kLinear));
    return dy * fused(z * s.of_z * s.of_minus_z, fused(square, 3 * kCubic, kLinear), s.of_z);
  }
};

template <class Math>
struct Silu {
  static constexpr Saves kSaves = Saves::z;
  template <class F>
  static MPK_FN F forward(F z) {
    return z * Math::logistic(z).of_z;
  }
  template <class F>
  static MPK_FN F backward(F dy, F z) {
    const Logistic<F> s = Math::logistic(z);
    return dy * (s.of_z * fused(z, s.of_minus_z, 1.0f));
  }
};

template <class Math>
struct Sigmoid {
  static constexpr Saves kSaves = Saves::y;
  template <class F>
  static MPK_FN F forward(F z) {
    return Math::logistic(z).of_z;
  }
  template <class F>
  static MPK_FN F backward(F dy, F y) {
    return dy * (y * (1.0f - y));
  }
};

template <class Math>
struct Tanh {
  static constexpr Saves kSaves = Saves::y;
  template <class F>
  static MPK_FN F forward(F z) {
    return Math::tanh(z);
  }
  template <class F>
  static MPK_FN F backward(F dy, F y) {
    return dy * (1.0f - y * y);
  }
};

enum class Activation : int32_t { none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, tanh };
inline constexpr const char* kActivationNames[] = {"none", "relu",    "relu2", "gelu", "gelu_tanh",
                                                   "silu", "sigmoid", "tanh"};  // in the order of Activation

// Calls body with a value of the type that activation names. The only switch over activations.
template <class Math = Fp32Math, class Body>
MPK_FN auto with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::relu:
      return body(Relu{});
    case Activation::relu2:
      return body(Relu2{});
    case Activation::gelu:
      return body(Gelu<Math>{});
    case Activation::gelu_tanh:
      return body(GeluTanh<Math>{});
    case Activation::silu:
      return body(Silu<Math>{});
    case Activation::sigmoid:
      return body(Sigmoid<Math>{});
    case Activation::tanh:
      return body(Tanh<Math>{});
    default:
      return body(Identity{});
  }
}

MPK_FN Saves saves(Activation activation) {
  return with_activation(activation, [](auto it) { return decltype(it)::kSaves; });
}

}  // namespace mpk
