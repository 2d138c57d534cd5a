// Lion as its authors publish it (lion_pytorch.py in google/automl).
#pragma once

#include "step/int8.h"

namespace mpk {

struct Lion {
  static constexpr const char* kOp = "lion_";

  static constexpr int kStates = 1, kNeeded = 1;
  static constexpr const char* kLists[] = {"exp_avgs"};
  static constexpr Sign kSigns[] = {Sign::any};
  static constexpr bool kOptionalIsRare = false, kIsTuned = false;

  struct Hyperparameters {
    double lr, beta1, beta2, weight_decay;
  };
  static constexpr int kMayBeTensors = 3;

  template <class C>
  struct Scalars {
    C decay, beta1, weight1, beta2, weight2, lr;
  };

  static MPK_FN Scalars<double> scalars(const Hyperparameters& group, double) {
    return {1 - group.lr * group.weight_decay, group.beta1, 1 - group.beta1, group.beta2, 1 - group.beta2, group.lr};
  }

  template <class F, class C>
  static MPK_FN void step(F& param, F grad, F (&states)[kStates], bool, const Scalars<C>& scalars) {
    auto& [exp_avg] = states;
    const F update = exp_avg * scalars.beta1 + grad * scalars.weight1;
    param = param * scalars.decay - sign(update) * scalars.lr;
    exp_avg = exp_avg * scalars.beta2 + grad * scalars.weight2;
  }
};

}  // namespace mpk
