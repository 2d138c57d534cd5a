// The part of Muon that goes element by element, as torch.optim.Muon steps: momentum, and the update that Newton-Schulz
// then orthogonalizes. The op's "params" are the updates, which this overwrites.
#pragma once

#include "step/int8.h"

namespace mpk {

struct Muon {
  static constexpr const char* kOp = "muon_";

  static constexpr int kStates = 1, kNeeded = 1;
  static constexpr const char* kLists[] = {"momentum_buffers"};
  static constexpr Sign kSigns[] = {Sign::any};
  static constexpr bool kOptionalIsRare = false, kIsTuned = false;

  struct Hyperparameters {
    double momentum, nesterov;  // nesterov: 1 or 0
  };
  static constexpr int kMayBeTensors = 1;

  template <class C>
  struct Scalars {
    C share, nesterov;
  };

  static MPK_FN Scalars<double> scalars(const Hyperparameters& group, double) {
    return {1 - group.momentum, group.nesterov};
  }

  template <class F, class C>
  static MPK_FN void step(F& update, F grad, F (&states)[kStates], bool, const Scalars<C>& scalars) {
    auto& [buffer] = states;
    buffer = buffer + (grad - buffer) * scalars.share;
    update = scalars.nesterov != 0 ? buffer + (grad - buffer) * scalars.share : buffer;
  }
};

}  // namespace mpk
