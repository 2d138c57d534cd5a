// What the linear ops do on CUDA around the products that torch makes.
#pragma once

#include "linear/linear_act_cuda.h"
#include "linear/linear_gated_cuda.h"
#include "linear/products_torch.h"

namespace mpk {

inline Strided strided(const Matrix& matrix) {
  return Strided(matrix.data, matrix.row_stride, matrix.column_stride, matrix.dtype);
}

// CpuPasses on CUDA, under the same names. While an object of this class lives, its device is the current one.
class CudaPasses {
 public:
  CudaPasses(const char* op, const Tensor& on_device_of) : op_(op), there_(on_device_of), device_(on_device_of) {}

  void activate(Activation activation, const Matrix& z, const Matrix& y) const {
    check(act_cuda(z.dtype, z.data, y.data, z.rows, z.columns, activation, device_.stream()));
  }
  void differentiate(Activation activation, const Matrix& dy, const Matrix& saved, const Matrix* dz, const Matrix* y,
                     const Matrix* dbias) const {
    const Strided known = saves(activation) == Saves::nothing ? Strided() : strided(saved);
    const int64_t blocks = count_row_blocks(dy.rows, dy.columns);
    const bool has_parts = dbias && blocks > 1;  // else dbias is the only row of sums
    const int64_t sizes[] = {has_parts ? blocks : 0, dy.columns};
    const Tensor parts = there_.new_empty(2, sizes, aoti_torch_dtype_float32());
    const Result sums = has_parts ? Result{parts.data(), Dtype::f32}
                        : dbias   ? Result{dbias->data, dbias->dtype}
                                  : Result{nullptr, Dtype::f32};
    check(act_backward_cuda(dy.dtype, strided(dy), known, dz ? dz->data : nullptr, y ? y->data : nullptr, sums, dy.rows,
                            dy.columns, activation, device_.stream()));
    if (has_parts)
      check(add_up_cuda(parts.data<float>(), {dbias->data, dbias->dtype}, blocks, dy.columns, device_.stream()));
  }
  void gate(Activation activation, const Matrix& z, const Matrix& h) const {
    check(linear_gated_cuda(z.dtype, z.data, h.data, h.rows, h.columns, activation, device_.stream()));
  }
  // dh may lie in h's memory: a thread reads an element before it writes there.
  void differentiate_gate(Activation activation, const Matrix& dh, const Matrix& z, const Matrix& dz,
                          const Matrix* h) const {
    const Strided gate = strided(z.columns_from(0, dh.columns)), up = strided(z.columns_from(dh.columns, dh.columns));
    check(linear_dgated_cuda(dh.dtype, strided(dh), gate, up, dz.data, h ? h->data : nullptr, dh.rows, dh.columns,
                             activation, device_.stream()));
  }
  void multiply_to_fp32(const Matrix& out, const Matrix& a, const Matrix& b) const { multiply(out, a, b); }

 private:
  void check(cudaError_t error) const { require_success(error, op_); }

  const char* op_;
  const Tensor& there_;
  const OnDeviceOf device_;
};

}  // namespace mpk
