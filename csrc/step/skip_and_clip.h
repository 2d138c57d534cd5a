// Whether a step is skipped, and what its grads are multiplied by: the loss scale's inverse, max_norm's coefficient.
#pragma once

#include "grads/overflow.h"

namespace mpk {

// What all parameters of a step share. The pointers are to the device, or null.
struct StepShared {
  const float* grad_scale;    // grads are divided by it
  const float* found_inf[2];  // the scaler's and the guard's: nothing moves unless both are 0
  const double* total_sumsq;  // the sum of the grads' squares, before unscaling
  double max_norm;            // inf: no clipping
  float* outcome;             // [0]: norm of the unscaled grads, if total_sumsq isn't null; [1]: 1 if skipped, else 0
  float* skipped_steps;       // counted up
  OverflowReport report;      // filled if the step is skipped
};

MPK_FN double unscale_factor(const StepShared& shared) {
  return shared.grad_scale ? static_cast<float>(1 / static_cast<double>(*shared.grad_scale)) : 1.0;
}

MPK_FN double unscaled_norm(const StepShared& shared) { return sqrt(*shared.total_sumsq) * unscale_factor(shared); }

// A scale below 1 can make finite grads overflow when they are unscaled: their norm is then beyond fp32. A scale of 0,
// or nearly so, makes NaN of grads of 0: its inverse is infinite.
MPK_FN bool is_skipped(const StepShared& shared) {
  for (const float* found_inf : shared.found_inf) {
    if (found_inf && *found_inf != 0) return true;
  }
  if (!shared.grad_scale) return false;
  const double unscaled = shared.total_sumsq ? unscaled_norm(shared) : unscale_factor(shared);
  return !(unscaled <= 0x1.fffffep127);
}

// Writes the norm and whether the step was skipped; counts skips.
MPK_FN void write_outcome(const StepShared& shared) {
  const bool skipped = is_skipped(shared);
  if (shared.outcome) {
    if (shared.total_sumsq) shared.outcome[0] = static_cast<float>(unscaled_norm(shared));
    shared.outcome[1] = skipped ? 1.0f : 0.0f;
  }
  if (shared.skipped_steps && skipped) *shared.skipped_steps += 1;
}

// Returns the factor that unscales and clips the grads.
MPK_FN double grad_factor(const StepShared& shared) {
  double factor = unscale_factor(shared);
  if (shared.total_sumsq && shared.max_norm < INFINITY) {
    const double coefficient = shared.max_norm / (unscaled_norm(shared) + 1e-6);
    if (!(coefficient >= 1)) factor *= coefficient;  // NaN stays NaN
  }
  return factor;
}

}  // namespace mpk
