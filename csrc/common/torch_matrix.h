// Matrices on the CPU, multiplied by torch's own kernels.
#pragma once

#include "torch.h"

namespace mpk {

// Rows and columns of memory that somebody else owns.
struct Matrix {
  void* data;
  int64_t rows, columns, row_stride, column_stride;
  int32_t torch_dtype;
  Dtype dtype;

  // Also of an argument that is only read.
  explicit Matrix(const Tensor& tensor)
      : data(const_cast<void*>(tensor.const_data())),
        rows(tensor.ndim() == 2 ? tensor.sizes()[0] : 1),  // one dimension: a row
        columns(tensor.sizes()[tensor.ndim() - 1]),
        row_stride(tensor.ndim() == 2 ? tensor.strides()[0] : 0),
        column_stride(tensor.strides()[tensor.ndim() - 1]),
        torch_dtype(tensor.dtype()) {
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
  Matrix repeated(int64_t count) const {  // of a row
    Matrix many = *this;
    many.rows = count;
    many.row_stride = 0;
    return many;
  }
  void* at(int64_t row) const { return static_cast<char*>(data) + row * row_stride * width_of(dtype); }
  bool is_contiguous() const {
    return rows * columns == 0 || ((columns == 1 || column_stride == 1) && (rows == 1 || row_stride == columns));
  }
  Tensor tensor() const {
    const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
    return Tensor::over(data, 2, sizes, strides, torch_dtype, {0, 0});
  }
};

// A matrix that owns its memory.
struct OwnMatrix {
  OwnMatrix(const Tensor& like, int64_t rows, int64_t columns, int32_t torch_dtype)
      : memory(make(like, rows, columns, torch_dtype)), view(memory) {}
  static Tensor make(const Tensor& like, int64_t rows, int64_t columns, int32_t torch_dtype) {
    const int64_t sizes[] = {rows, columns};
    return like.new_empty(2, sizes, torch_dtype);
  }
  Tensor memory;
  Matrix view;
};

inline void multiply(const Matrix& out, const Matrix& a, const Matrix& b) {
  const Tensor result = out.tensor(), left = a.tensor(), right = b.tensor();
  require(aoti_torch_cpu_mm_out(result.handle(), left.handle(), right.handle()) == 0, "mpkernels",
          "torch could not multiply two matrices");
}

// out = a b + c, where c may be out.
inline void multiply_add(const Matrix& out, const Matrix& a, const Matrix& b, const Matrix& c) {
  const Tensor result = out.tensor(), left = a.tensor(), right = b.tensor(), sum = c.tensor();
  require(aoti_torch_cpu_addmm_out(result.handle(), sum.handle(), left.handle(), right.handle(), 1, 1) == 0,
          "mpkernels", "torch could not multiply two matrices");
}

// Calls body(first, last) for ranges of [0, count) on torch's own threads; each takes so many elements.
template <class Body>
void parallel_for(int64_t count, int64_t elements, const Body& body) {
  const auto run = [](int64_t first, int64_t last, void* body) { (*static_cast<const Body*>(body))(first, last); };
  torch_parallel_for(0, count, 1 + kCpuChunk / (elements + 1), run, const_cast<Body*>(&body));
}

}  // namespace mpk
