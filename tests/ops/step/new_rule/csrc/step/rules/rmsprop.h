// RMSprop as torch.optim.RMSprop (foreach=False) steps, without its options.
#pragma once

#include "step/int8.h"

namespace mpk {

struct Rmsprop {
  static constexpr const char* kOp = "rmsprop_";
  static constexpr int kStates = 1, kNeeded = 1;
  static constexpr const char* kLists[] = {"square_avgs"};
  static constexpr Sign kSigns[] = {Sign::not_negative};
  static constexpr bool kOptionalIsRare = false, kIsTuned = false;
  struct Hyperparameters {
    double lr, alpha, eps;
  };
  static constexpr int kMayBeTensors = 1;
  template <class C>
  struct Scalars {
    C lr, alpha, weight, eps;
  };

  static MPK_FN Scalars<double> scalars(const Hyperparameters& group, double) {
    return {group.lr, group.alpha, 1 - group.alpha, group.eps};
  }
  template <class F, class C>
  static MPK_FN void step(F& param, F grad, F (&states)[kStates], bool, const Scalars<C>& scalars) {
    auto& [square_avg] = states;
    square_avg = square_avg * scalars.alpha + grad * scalars.weight * grad;
    param = param - scalars.lr * grad / (SquareRoot<F>::of(square_avg) + scalars.eps);
  }
};

}  // namespace mpk
