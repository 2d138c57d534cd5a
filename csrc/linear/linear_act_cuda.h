// The passes of linear_act on CUDA: over z, after the product that makes z, and over dz, before the products with dz.
#pragma once

#include <cuda_runtime.h>

#include "common/table.h"
#include "linear/activation.h"

namespace mpk {

// A matrix in any layout, even an expanded one.
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

// In all of these functions, 16-bit results are rounded once, a matrix is of dtype unless it has a dtype of its own,
// and there is at least one row and one column.
//
// Computes y, which may share z's memory, from z; both are contiguous.
cudaError_t act_cuda(Dtype dtype, const void* z, void* y, int64_t rows, int64_t columns, Activation activation,
                     cudaStream_t stream);
// Computes those of dz, y and sums that aren't null, from dy and saved. dz may share dy's memory; y is made only from a
// saved z; sums are the sums of dz's columns before rounding, in count_row_blocks(rows, columns) rows. Here, rows may
// be 0.
cudaError_t act_backward_cuda(Dtype dtype, const Strided& dy, const Strided& saved, void* dz, void* y,
                              const Result& sums, int64_t rows, int64_t columns, Activation activation,
                              cudaStream_t stream);
int64_t count_row_blocks(int64_t rows, int64_t columns);
// Adds up these rows of sums.
cudaError_t add_up_cuda(const float* rows_of_sums, const Result& sum, int64_t rows, int64_t columns,
                        cudaStream_t stream);

}  // namespace mpk
