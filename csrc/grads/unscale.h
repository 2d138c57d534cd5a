// unscale_: grads *= inv_scale in place; found_inf = 1 where a result is inf or NaN.
#pragma once

#include "common/cpu.h"
#include "common/table.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// Checking the product finds every inf and NaN: a non-finite grad stays non-finite, and a finite grad that overflows
// when it is unscaled (scale < 1) spoils the step as well.
template <class F>
MPK_FN F unscale(F grad, float inv_scale) {
  return grad * inv_scale;
}

// Returns whether a result is inf or NaN.
MPK_FOR_EACH_ISA(bool unscale_span(Dtype dtype, void* grads, int64_t size, float inv_scale))

#ifdef MPK_CUDA
// `memory` comes from RowMemory.
cudaError_t unscale_cuda(const Table& grads, Row* memory, float* found_inf, const float* inv_scale,
                         cudaStream_t stream);
#endif

}  // namespace mpk
