// The two passes of linear_gated and linear_dgated on CUDA: over z, after the products that make z, and over dh.
#pragma once

#include "linear/linear_act_cuda.h"

namespace mpk {

// In both functions, each matrix is of dtype, 16-bit results are rounded once, and there is at least one row and one
// column.
//
// Computes h from a contiguous z, [rows, 2 columns].
cudaError_t linear_gated_cuda(Dtype dtype, const void* z, void* h, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream);
// Computes a contiguous dz, [rows, 2 columns], from dh, gate and up; and h, unless it is null.
cudaError_t linear_dgated_cuda(Dtype dtype, const Strided& dh, const Strided& gate, const Strided& up, void* dz,
                               void* h, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream);

}  // namespace mpk
