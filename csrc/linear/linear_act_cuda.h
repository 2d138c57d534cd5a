// The two passes of linear_act on CUDA: over z, after the product that makes it, and over dz, before those that need
// it.
#pragma once

#include "linear/activation.h"
#include "linear/strided.h"

namespace mpk {

struct Result {
  void* data;  // or null
  Dtype dtype;
};

// z + bias -> y, and saved unless null, each rounded once. z may be y. bias is one row, or null. There is a row and a
// column at least.
cudaError_t bias_act_cuda(Dtype dtype, const float* z, const Strided& bias, void* y, void* saved, int64_t rows,
                          int64_t columns, Activation activation, cudaStream_t stream);
// dy, fp32 or of dtype, and saved -> dz unless null, and the sums of its columns before rounding: a row for each of
// count_row_blocks(rows, columns), unless null. Of a dy in fp32 and a saved z also y anew, unless null. dz may be dy.
// There is a column at least.
cudaError_t act_backward_cuda(Dtype dtype, const Strided& dy, const Strided& saved, void* dz, void* y,
                              const Result& sums, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream);
int64_t count_row_blocks(int64_t rows, int64_t columns);
// Such rows of sums -> their sum.
cudaError_t add_up_cuda(const float* rows_of_sums, const Result& sum, int64_t rows, int64_t columns,
                        cudaStream_t stream);

}  // namespace mpk
