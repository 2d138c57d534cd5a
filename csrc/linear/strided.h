// A matrix as the CUDA passes beside the products read it.
#pragma once

#include <cuda_runtime.h>

#include "common/table.h"

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

}  // namespace mpk
