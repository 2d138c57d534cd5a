// linear_dact on CUDA: products by cuBLAS into fp32, some rows at a time, and a pass over each; or one product that
// ends in what the pass would do, where cublasLt has it.
#ifdef MPK_CUDA

#include "linear/linear_act_cuda_torch.h"
#include "linear/linear_dact_torch.h"
#include "linear/torch_cublaslt.h"

namespace mpk {

static void multiply_and_pass(const LinearDactArguments& it, const Matrix& dy, const Matrix& weight, const Matrix& dz,
                              const Tensor& dbias, const Tensor& h, cudaStream_t stream) {
  const Cublas cublas(it.kOp, it.dy, stream);
  const bool in_place = it.dtype == Dtype::f32;
  const int64_t at_once = in_place ? dz.rows : rows_at_once(it.kOp, it.dy, dz.rows, dz.columns);
  const OwnMatrix scratch(it.dy, in_place ? 0 : at_once, dz.columns, aoti_torch_dtype_float32());
  const int64_t whole = (dz.rows - 1) / at_once, blocks = count_row_blocks(at_once, dz.columns);
  const ColumnSums sums(dbias, whole * blocks + count_row_blocks(dz.rows - whole * at_once, dz.columns));
  for (int64_t first = 0, block = 0; first < dz.rows; first += at_once, block += blocks) {
    const int64_t rows = std::min(at_once, dz.rows - first);
    const Matrix to = dz.rows_from(first, rows), product = in_place ? to : scratch.view.rows_from(0, rows);
    cublas.multiply(product, dy.rows_from(first, rows), weight);
    const Strided saved =
        saves(it.activation) == Saves::nothing ? Strided() : strided(Matrix(it.saved).rows_from(first, rows));
    require_success(
        act_backward_cuda(it.dtype, strided(product), saved, to.data, it.wants_h ? Matrix(h).at(first) : nullptr,
                          sums.of_block(block), rows, dz.columns, it.activation, stream),
        it.kOp);
  }
  sums.add_up(it.kOp, stream);
}

// Only where neither h is wanted, for the pass makes it on its way, nor dbias: it would be a sum of what is rounded
// already.
static bool multiply_with_ending(const LinearDactArguments& it, const Matrix& dy, const Matrix& weight,
                                 const Matrix& dz, cudaStream_t stream) {
  if (it.activation != Activation::gelu_tanh || it.dtype == Dtype::f32 || it.wants_dbias() || it.wants_h ||
      dy.columns == 0)
    return false;
  const cublaslt::Ending ending{{}, cublaslt::kSlopeOfGelu, Matrix(it.saved)};
  return multiply_by_cublaslt(it.kOp, it.dy, stream, dz, dy, weight, ending);
}

static void linear_dact_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearDactArguments it(stack);
  const OnDeviceOf device(it.dy);
  Tensor dz = it.new_dz(), dbias = it.new_dbias(), h = it.new_h();
  if (dz.size() > 0) {
    const Operand dy(it.dy), weight(it.weight);
    if (!multiply_with_ending(it, dy.matrix(), weight.matrix(), Matrix(dz), device.stream()))
      multiply_and_pass(it, dy.matrix(), weight.matrix(), Matrix(dz), dbias, h, device.stream());
  } else if (dbias.size() > 0) {
    require_success(cudaMemsetAsync(dbias.data(), 0, dbias.size() * width_of(Matrix(dbias).dtype), device.stream()),
                    it.kOp);
  }
  stack[0] = dz.release();
  stack[1] = dbias.release();
  stack[2] = h.release();
}
MPK_CUDA_KERNEL(LinearDactArguments::kOp, linear_dact_on_cuda)

}  // namespace mpk

#endif
