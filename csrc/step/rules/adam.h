// Adam as torch.optim.Adam (foreach=False) steps: like AdamW, but a decay that isn't decoupled is added to the grad.
#pragma once

#include "step/rules/adamw.h"

namespace mpk {

struct Adam : Adamw {
  static constexpr const char* kOp = "adam_";
  static constexpr bool kIsTuned = false;

  struct Hyperparameters {
    double lr, beta1, beta2, weight_decay, eps, decoupled;  // decoupled: 1 or 0
  };

  template <class C>
  struct Scalars {
    C joined_decay;
    Adamw::Scalars<C> adamw;
  };

  static MPK_FN Scalars<double> scalars(const Hyperparameters& group, double step) {
    const double decoupled = group.decoupled != 0 ? group.weight_decay : 0;
    return {group.weight_decay - decoupled,
            Adamw::scalars({group.lr, group.beta1, group.beta2, decoupled, group.eps}, step)};
  }

  template <class F, class C>
  static MPK_FN void step(F& param, F grad, F (&states)[kStates], bool amsgrad, const Scalars<C>& scalars) {
    Adamw::step(param, grad + param * scalars.joined_decay, states, amsgrad, scalars.adamw);
  }
};

}  // namespace mpk
