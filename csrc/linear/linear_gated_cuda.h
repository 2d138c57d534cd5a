// The two passes of linear_gated and linear_dgated on CUDA: over z, after the products that make z, and over dh.
#pragma once

#include "linear/linear_act_cuda.h"

namespace mpk {

// All is of dtype, and 16-bit results are rounded once. There is a row and a column at least.
//
// Contiguous z, [rows, 2 columns] -> h.
cudaError_t linear_gated_cuda(Dtype dtype, const void* z, void* h, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream);
// dh, and gate and up -> contiguous dz, [rows, 2 columns], and h unless null.
cudaError_t linear_dgated_cuda(Dtype dtype, const Strided& dh, const Strided& gate, const Strided& up, void* dz,
                               void* h, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream);

}  // namespace mpk
