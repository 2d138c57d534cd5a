// A matrix as kernels see it: in any strides and on any device.
#pragma once

#include "common/table.h"
#include "common/tensor.h"

namespace mpk {

// A view of a tensor, which must outlive the view, or of bare memory.
struct Matrix {
  const Tensor* owner;  // null for bare memory
  void* data;
  int64_t rows, columns, row_stride, column_stride;
  int32_t torch_dtype;
  std::pair<int32_t, int32_t> device;  // type, index
  Dtype dtype;

  explicit Matrix(const Tensor& tensor)
      : owner(&tensor),
        data(const_cast<void*>(tensor.const_data())),
        rows(tensor.ndim() == 2 ? tensor.sizes()[0] : 1),  // one dimension: a row
        columns(tensor.sizes()[tensor.ndim() - 1]),
        row_stride(tensor.ndim() == 2 ? tensor.strides()[0] : 0),
        column_stride(tensor.strides()[tensor.ndim() - 1]),
        torch_dtype(tensor.dtype()),
        device(tensor.device()) {
    find_dtype(torch_dtype, &dtype);
  }
  // A contiguous matrix in bare memory.
  Matrix(void* data, int64_t rows, int64_t columns, int32_t torch_dtype, std::pair<int32_t, int32_t> device)
      : owner(nullptr),
        data(data),
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
  // Whether this is all of a tensor that is a matrix, in the tensor's own strides.
  bool is_whole() const {
    return owner && owner->ndim() == 2 && data == owner->const_data() && rows == owner->sizes()[0] &&
           columns == owner->sizes()[1] && row_stride == owner->strides()[0] && column_stride == owner->strides()[1];
  }
  Tensor tensor() const {
    const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
    return view(2, sizes, strides);
  }
  Tensor vector() const {  // of a matrix with one row
    return view(1, &columns, &column_stride);
  }

 private:
  Tensor view(int64_t ndim, const int64_t* sizes, const int64_t* strides) const {
    if (!owner) return Tensor::over(data, ndim, sizes, strides, torch_dtype, device);
    const int64_t bytes = static_cast<const char*>(data) - static_cast<const char*>(owner->const_data());
    return owner->view(bytes / width_of(dtype), ndim, sizes, strides);
  }
};

}  // namespace mpk
