// update_scale_: updates the loss scale after a step, by whether the step has overflowed.
#pragma once

#include "common/numeric.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

struct ScaleState {
  float* scale;
  int32_t* growth_tracker;  // steps since the last overflow or growth
  int32_t* overflows;       // [0]: in a row; [1]: in all
};

struct ScalePolicy {
  double growth_factor, backoff_factor;
  int64_t growth_interval;
  double min_scale, max_scale;
  int64_t hysteresis;
};

// Equals torch's _amp_update_scale_ to the bit if min_scale is 0, max_scale inf and hysteresis 1.
MPK_FN void update_scale(const ScaleState& state, const float* found_inf, const ScalePolicy& policy) {
  const double scale = *state.scale;
  if (*found_inf != 0) {
    const double backed_off = scale * policy.backoff_factor;
    ++state.overflows[1];
    if (++state.overflows[0] >= policy.hysteresis)
      *state.scale = static_cast<float>(backed_off < policy.min_scale ? policy.min_scale : backed_off);
    *state.growth_tracker = 0;
    return;
  }
  state.overflows[0] = 0;
  if (++*state.growth_tracker != policy.growth_interval) return;
  const double grown = scale * policy.growth_factor;
  const float rounded = static_cast<float>(grown > policy.max_scale ? policy.max_scale : grown);
  if (!is_non_finite<float>(rounded)) *state.scale = rounded;
  *state.growth_tracker = 0;
}

#ifdef MPK_CUDA
cudaError_t update_scale_cuda(const ScaleState& state, const float* found_inf, const ScalePolicy& policy,
                              cudaStream_t stream);
#endif

}  // namespace mpk
