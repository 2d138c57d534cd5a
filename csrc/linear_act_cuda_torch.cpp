// linear_act on CUDA: products by cuBLAS, and one pass over z, or over dz, between them.
#ifdef MPK_CUDA

#include "common/cublas.h"
#include "linear_act_cuda.h"
#include "linear_act_torch.h"

namespace mpk {

// z in fp32, of 16-bit inputs, lives in scratch no larger than this, a block of rows at a time: the L2 cache of the
// chips that matter holds it until the pass has read it.
static constexpr int64_t kMostScratch = int64_t{32} << 20;

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As many rows of z as fit, in blocks of equal length, whole tiles of a product.
static int64_t rows_at_once(int64_t rows, int64_t columns) {
  constexpr int64_t kTile = 256;
  const int64_t most = std::max(kTile, kMostScratch / (4 * columns) / kTile * kTile);
  return std::min(rows, divide_up(divide_up(rows, divide_up(rows, most)), kTile) * kTile);
}

static Strided strided(const Tensor& matrix, Dtype dtype) {
  return Strided(matrix.const_data(), matrix.strides()[0], matrix.strides()[1], dtype);
}

static void linear_act_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActArguments it(stack);
  const char* const op = it.kOp;
  const OnDeviceOf device(it.x);
  const cudaStream_t stream = device.stream();
  const int64_t nothing = 0;
  Tensor y = it.new_output(), saved = it.saves_z() ? it.new_output() : it.x.new_empty(1, &nothing, it.x.dtype());
  if (y.size() > 0) {
    const Operand x(it.x), weight(it.weight);
    const Matrix transposed_weight = weight.matrix().transposed();
    const Cublas cublas(op, it.x, stream);
    if (it.activation == Activation::none && !it.bias) {
      cublas.multiply(x.matrix(), transposed_weight, y.data(), it.dtype);
    } else {
      Matrix to(y), kept(y);
      void* const kept_data = it.saves_z() ? saved.data() : nullptr;
      const Strided bias = it.bias ? Strided(it.bias->const_data(), 0, it.bias->strides()[0], it.dtype) : Strided();
      const bool in_place = it.dtype == Dtype::f32;
      const int64_t block = in_place ? it.rows() : rows_at_once(it.rows(), it.outputs());
      const Tensor scratch = it.x.scratch(in_place ? 0 : 4 * block * it.outputs());
      for (int64_t first = 0; first < it.rows(); first += block) {
        const int64_t rows = std::min(block, it.rows() - first), offset = first * it.outputs() * width_of(it.dtype);
        void* const y_rows = static_cast<char*>(to.data) + offset;
        void* const saved_rows = kept_data ? static_cast<char*>(kept_data) + offset : nullptr;
        float* const z = static_cast<float*>(in_place ? y_rows : scratch.data());
        cublas.multiply(x.matrix().rows_from(first, rows), transposed_weight, z, Dtype::f32);
        require_success(bias_act_cuda(it.dtype, z, bias, y_rows, saved_rows, rows, it.outputs(), it.activation, stream),
                        op);
      }
    }
  }
  stack[0] = y.release();
  stack[1] = saved.release();
}
MPK_CUDA_KERNEL(LinearActArguments::kOp, linear_act_on_cuda)

static void linear_act_backward_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActBackwardArguments it(stack);
  const char* const op = it.kOp;
  const OnDeviceOf device(it.dy);
  const cudaStream_t stream = device.stream();
  Tensor dx = it.new_dx(), dweight = it.new_dweight(), dbias = it.new_dbias();

  const bool wants_product = it.wants_dx() || it.wants_dweight();
  const Matrix dy(it.dy);
  std::unique_ptr<OwnMatrix> rounded;
  if (wants_product && (it.activation != Activation::none || !cublas::is_readable(dy)))
    rounded = std::make_unique<OwnMatrix>(it.dy, it.rows(), it.outputs(), it.dy.dtype());
  if (rounded || it.wants_dbias()) {
    const bool has_saved = saves(it.activation) != Saves::nothing;
    Result sums{nullptr, it.dtype};
    if (it.wants_dbias()) find_dtype(it.bias_dtype, &sums.dtype), sums.data = dbias.data();
    const Tensor partial = it.dy.scratch(sums.data ? 4 * count_partial_sums(it.rows(), it.outputs()) : 0);
    require_success(
        act_backward_cuda(it.dtype, strided(it.dy, it.dtype), has_saved ? strided(it.saved, it.dtype) : Strided(),
                          rounded ? rounded->view.data : nullptr, sums, partial.data<float>(), it.rows(), it.outputs(),
                          it.activation, stream),
        op);
  }
  if (wants_product) {
    const Matrix& dz = rounded ? rounded->view : dy;
    const Cublas cublas(op, it.dy, stream);
    if (it.wants_dx()) cublas.multiply(dz, Operand(*it.weight).matrix(), dx.data(), it.dtype);
    if (it.wants_dweight()) {
      Dtype dtype;
      find_dtype(it.weight_dtype, &dtype);
      cublas.multiply(dz.transposed(), Operand(*it.x).matrix(), dweight.data(), dtype);
    }
  }
  stack[0] = dx.release();
  stack[1] = dweight.release();
  stack[2] = dbias.release();
}
MPK_CUDA_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cuda)

}  // namespace mpk

#endif
