// AdamW as torch.optim.AdamW (foreach=False) steps, in its order of operations.
#pragma once

#include "step/int8.h"

namespace mpk {

struct Adamw {
  static constexpr const char* kOp = "adamw_";

  // The states of a parameter, by the names of their lists. Those from kNeeded on are there with amsgrad only.
  static constexpr int kStates = 3, kNeeded = 2;
  static constexpr const char* kLists[] = {"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
  static constexpr Sign kSigns[] = {Sign::any, Sign::not_negative, Sign::not_negative};
  static constexpr bool kOptionalIsRare = true;  // most kernels leave these states out

  // Whether CUDA has a loop for each usual kind of row, and a kernel for 8-bit states alone. Those run faster, and take
  // twice as long to compile.
  static constexpr bool kIsTuned = true;

  // The hyperparameters of a group. The first kMayBeTensors may be tensors, which are read at each step.
  struct Hyperparameters {
    double lr, beta1, beta2, weight_decay, eps;
  };
  static constexpr int kMayBeTensors = 3;

  // Numbers that all elements of a parameter share.
  template <class C>
  struct Scalars {
    C decay, weight1, beta2, weight2, step_size, eps;
  };

  // step: 1 at the first step. step_size and eps include the root's bias correction, which saves a division per element
  // that a CPU would wait for.
  static MPK_FN Scalars<double> scalars(const Hyperparameters& group, double step) {
    const double correction1 = 1 - pow(group.beta1, step), correction2 = sqrt(1 - pow(group.beta2, step));
    return {1 - group.lr * group.weight_decay,    1 - group.beta1,        group.beta2, 1 - group.beta2,
            group.lr / correction1 * correction2, group.eps * correction2};
  }

  template <class F, class C>
  static MPK_FN void step(F& param, F grad, F (&states)[kStates], bool amsgrad, const Scalars<C>& scalars) {
    auto& [exp_avg, exp_avg_sq, max_exp_avg_sq] = states;
    param = param * scalars.decay;
    exp_avg = exp_avg + (grad - exp_avg) * scalars.weight1;
    exp_avg_sq = exp_avg_sq * scalars.beta2 + grad * scalars.weight2 * grad;
    if (amsgrad) max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq);
    const F root = SquareRoot<F>::of(amsgrad ? max_exp_avg_sq : exp_avg_sq);
    param = param - scalars.step_size * exp_avg / (root + scalars.eps);
  }
};

}  // namespace mpk
