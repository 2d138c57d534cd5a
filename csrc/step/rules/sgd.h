// SGD as torch.optim.SGD (foreach=False) steps, in its order of operations.
#pragma once

#include "step/int8.h"

namespace mpk {

struct Sgd {
  static constexpr const char* kOp = "sgd_";

  // The momentum buffer, which is there with momentum only.
  static constexpr int kStates = 1, kNeeded = 0;
  static constexpr const char* kLists[] = {"momentum_buffers"};
  static constexpr Sign kSigns[] = {Sign::any};
  static constexpr bool kOptionalIsRare = false, kIsTuned = false;

  struct Hyperparameters {
    double lr, weight_decay, momentum, dampening, nesterov;  // nesterov: 1 or 0
  };
  static constexpr int kMayBeTensors = 2;

  template <class C>
  struct Scalars {
    C weight_decay, momentum, update_share, nesterov, lr;
  };

  // step: 1 at the first step, after which the momentum buffer is the grad.
  static MPK_FN Scalars<double> scalars(const Hyperparameters& group, double step) {
    const bool is_first = step == 1;
    return {group.weight_decay, is_first ? 0 : group.momentum, is_first ? 1 : 1 - group.dampening,
            group.nesterov * group.momentum, group.lr};
  }

  template <class F, class C>
  static MPK_FN void step(F& param, F grad, F (&states)[kStates], bool has_momentum, const Scalars<C>& scalars) {
    auto& [buffer] = states;
    F update = grad + param * scalars.weight_decay;
    if (has_momentum) {
      buffer = buffer * scalars.momentum + update * scalars.update_share;
      update = scalars.nesterov != 0 ? update + buffer * scalars.nesterov : buffer;
    }
    param = param - update * scalars.lr;
  }
};

}  // namespace mpk
