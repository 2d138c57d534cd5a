#include "common/cuda.h"
#include "grads/update_scale.h"

namespace mpk {

__global__ void __launch_bounds__(kThreads)
    update_scale_kernel(ScaleState state, const float* found_inf, ScalePolicy policy) {
  if (threadIdx.x == 0) update_scale(state, found_inf, policy);
}

cudaError_t update_scale_cuda(const ScaleState& state, const float* found_inf, const ScalePolicy& policy,
                              cudaStream_t stream) {
  return launch(update_scale_kernel, 1, stream, state, found_inf, policy);
}

}  // namespace mpk
