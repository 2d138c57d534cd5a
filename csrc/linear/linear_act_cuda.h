// The passes of linear_act on CUDA: over z, after the product that makes it, and over dz, before those that need it.
#pragma once

#include <cuda_runtime.h>

#include "common/table.h"
#include "linear/activation.h"

namespace mpk {

// A matrix in any layout, an expanded one among them.
struct Strided {
  Strided() = default;
  Strided(const void* data, int64_t row_stride, int64_t column_stride, Dtype dtype)
      : data(data),
        row_stride(row_stride),
        column_stride(column_stride),
        dtype(dtype),
        is_packed(column_stride == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                  row_stride * width_of(dtype) % 16 == 0) {}
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 0;
  Dtype dtype = Dtype::f32;
  bool is_packed = false;  // 16 bytes of a row can be read at once
};

struct Result {
  void* data;  // or null
  Dtype dtype;
};

// z -> y, which may be z; both are contiguous. Here and below, 16-bit results are rounded once, everything is of
// dtype unless it names another one, and there is a row and a column at least.
cudaError_t act_cuda(Dtype dtype, const void* z, void* y, int64_t rows, int64_t columns, Activation activation,
                     cudaStream_t stream);
// dy and saved -> dz, which may be dy, unless null; of a saved z also y anew, unless null; and the sums of dz's columns
// before rounding, unless null: a row for each of count_row_blocks(rows, columns). There may be no row.
cudaError_t act_backward_cuda(Dtype dtype, const Strided& dy, const Strided& saved, void* dz, void* y,
                              const Result& sums, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream);
int64_t count_row_blocks(int64_t rows, int64_t columns);
// Such rows of sums -> their sum.
cudaError_t add_up_cuda(const float* rows_of_sums, const Result& sum, int64_t rows, int64_t columns,
                        cudaStream_t stream);

}  // namespace mpk
