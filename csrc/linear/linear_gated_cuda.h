// The two passes of linear_gated and linear_dgated on CUDA: over z, after the products that make it, and over dh.
#pragma once

#include "linear/activation.h"
#include "linear/strided.h"

namespace mpk {

// Contiguous z, [rows, 2 columns], plus the biases, each one row or null -> h, and saved unless null, each rounded
// once. z may be saved. There is a row and a column at least.
cudaError_t linear_gated_cuda(Dtype dtype, const float* z, const Strided& gate_bias, const Strided& up_bias, void* h,
                              void* saved, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream);
// dh, fp32 or of dtype, and gate and up -> contiguous dz, [rows, 2 columns], and h unless null.
cudaError_t linear_dgated_cuda(Dtype dtype, const Strided& dh, const Strided& gate, const Strided& up, void* dz,
                               void* h, int64_t rows, int64_t columns, Activation activation, cudaStream_t stream);

}  // namespace mpk
