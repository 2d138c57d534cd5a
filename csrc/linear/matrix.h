// A matrix as kernels take it apart: any strides, any place, any device.
#pragma once

#include "common/table.h"
#include "common/tensor.h"

namespace mpk {

// Rows and columns of memory that somebody else owns.
struct Matrix {
  void* data;
  int64_t rows, columns, row_stride, column_stride;
  int32_t torch_dtype;
  std::pair<int32_t, int32_t> device;  // type, index
  Dtype dtype;

  explicit Matrix(const Tensor& tensor)
      : data(const_cast<void*>(tensor.const_data())),
        rows(tensor.ndim() == 2 ? tensor.sizes()[0] : 1),  // one dimension: a row
        columns(tensor.sizes()[tensor.ndim() - 1]),
        row_stride(tensor.ndim() == 2 ? tensor.strides()[0] : 0),
        column_stride(tensor.strides()[tensor.ndim() - 1]),
        torch_dtype(tensor.dtype()),
        device(tensor.device()) {
    find_dtype(torch_dtype, &dtype);
  }
  // Contiguous.
  Matrix(void* data, int64_t rows, int64_t columns, int32_t torch_dtype, std::pair<int32_t, int32_t> device)
      : data(data),
        rows(rows),
        columns(columns),
        row_stride(columns),
        column_stride(1),
        torch_dtype(torch_dtype),
        device(device) {
    find_dtype(torch_dtype, &dtype);
  }
  Matrix transposed() const {
    Matrix other = *this;
    std::swap(other.rows, other.columns);
    std::swap(other.row_stride, other.column_stride);
    return other;
  }
  Matrix rows_from(int64_t first, int64_t count) const {
    Matrix part = *this;
    part.data = at(first);
    part.rows = count;
    return part;
  }
  Matrix columns_from(int64_t first, int64_t count) const { return transposed().rows_from(first, count).transposed(); }
  void* at(int64_t row) const { return static_cast<char*>(data) + row * row_stride * width_of(dtype); }
  bool is_contiguous() const {
    return rows * columns == 0 || ((columns == 1 || column_stride == 1) && (rows == 1 || row_stride == columns));
  }
  Tensor tensor() const {
    const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
    return Tensor::over(data, 2, sizes, strides, torch_dtype, device);
  }
  Tensor vector() const {  // of a row
    return Tensor::over(data, 1, &columns, &column_stride, torch_dtype, device);
  }
};

}  // namespace mpk
