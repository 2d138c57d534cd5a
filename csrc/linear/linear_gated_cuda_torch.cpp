// linear_gated and linear_dgated on CUDA: products by cuBLAS into fp32, some rows at a time, and a pass over each.
#ifdef MPK_CUDA

#include "linear/linear_act_cuda_torch.h"
#include "linear/linear_gated_cuda.h"
#include "linear/linear_gated_torch.h"

namespace mpk {

static Strided strided(const std::unique_ptr<Tensor>& bias, Dtype dtype) {
  return bias ? Strided(bias->const_data(), 0, bias->strides()[0], dtype) : Strided();
}

static void linear_gated_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearGatedArguments it(stack);
  const OnDeviceOf device(it.x);
  Tensor h = it.new_h(), saved = it.new_z(it.save);
  if (h.size() > 0) {
    const Cublas cublas(it.kOp, it.x, device.stream());
    const Operand x(it.x), gate_weight(it.gate_weight), up_weight(it.up_weight);
    const auto both = joined(gate_weight.matrix(), up_weight.matrix());
    const Matrix of_h(h), of_saved(saved);
    const int64_t columns = it.outputs();
    const bool in_place = it.dtype == Dtype::f32 && it.save;
    const int64_t block = in_place ? it.rows() : rows_at_once(it.kOp, it.x, it.rows(), 2 * columns);
    const OwnMatrix scratch(it.x, in_place ? 0 : block, 2 * columns, aoti_torch_dtype_float32());
    for (int64_t first = 0; first < it.rows(); first += block) {
      const int64_t rows = std::min(block, it.rows() - first);
      const Matrix z = in_place ? of_saved : scratch.view.rows_from(0, rows), part = x.matrix().rows_from(first, rows);
      if (both || it.features() == 0) {  // without features it zeroes z as one
        cublas.multiply(z, part, (both ? *both : gate_weight.matrix()).transposed());
      } else {
        cublas.multiply(columns_from(z, 0, columns), part, gate_weight.matrix().transposed());
        cublas.multiply(columns_from(z, columns, columns), part, up_weight.matrix().transposed());
      }
      require_success(
          linear_gated_cuda(it.dtype, static_cast<float*>(z.data), strided(it.gate_bias, it.dtype),
                            strided(it.up_bias, it.dtype), of_h.at(first), it.save ? of_saved.at(first) : nullptr, rows,
                            columns, it.activation, device.stream()),
          it.kOp);
    }
  }
  stack[0] = h.release();
  stack[1] = saved.release();
}
MPK_CUDA_KERNEL(LinearGatedArguments::kOp, linear_gated_on_cuda)

static void linear_dgated_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearDgatedArguments it(stack);
  const OnDeviceOf device(it.z);
  Tensor dz = it.new_dz(), h = it.new_h();
  const int64_t columns = it.columns();
  const auto pass = [&](const Matrix& dh, int64_t first) {
    const Matrix z = Matrix(it.z).rows_from(first, dh.rows);
    require_success(linear_dgated_cuda(it.dtype, strided(dh), strided(columns_from(z, 0, columns)),
                                       strided(columns_from(z, columns, columns)), Matrix(dz).at(first),
                                       it.wants_h ? Matrix(h).at(first) : nullptr, dh.rows, columns, it.activation,
                                       device.stream()),
                    it.kOp);
  };
  if (dz.size() > 0 && !it.weight) {
    pass(Matrix(it.dy), 0);
  } else if (dz.size() > 0) {
    const Cublas cublas(it.kOp, it.z, device.stream());
    const Operand dy(it.dy), weight(*it.weight);
    const int64_t block = rows_at_once(it.kOp, it.z, it.rows(), columns);
    const OwnMatrix scratch(it.z, block, columns, aoti_torch_dtype_float32());
    for (int64_t first = 0; first < it.rows(); first += block) {
      const Matrix dh = scratch.view.rows_from(0, std::min(block, it.rows() - first));
      cublas.multiply(dh, dy.matrix().rows_from(first, dh.rows), weight.matrix());
      pass(dh, first);
    }
  }
  stack[0] = dz.release();
  stack[1] = h.release();
}
MPK_CUDA_KERNEL(LinearDgatedArguments::kOp, linear_dgated_on_cuda)

}  // namespace mpk

#endif
