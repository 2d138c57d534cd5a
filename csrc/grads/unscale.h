// unscale_: grads *= inv_scale in place; found_inf = 1 where a result is inf or NaN.
#pragma once

#include "common/cpu.h"
#include "common/table.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// The product alone need be looked at for inf and NaN: a non-finite grad times anything is non-finite, and a finite one
// that overflows on the way back (scale < 1) is just as fatal.
template <class F>
MPK_FN F unscale(F grad, float inv_scale) {
  return grad * inv_scale;
}

// True where a result is non-finite.
MPK_FOR_EACH_ISA(bool unscale_span(Dtype dtype, void* grads, int64_t size, float inv_scale))

#ifdef MPK_CUDA
// memory: for the rows, where they need it (RowMemory).
cudaError_t unscale_cuda(const Table& grads, Row* memory, float* found_inf, const float* inv_scale,
                         cudaStream_t stream);
#endif

}  // namespace mpk
