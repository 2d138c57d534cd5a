// linear_act on CUDA: products by cuBLAS, and one pass over z, or over dz, between them; in the forward a product that
// ends in what the pass would do, where cublasLt has it.
#ifdef MPK_CUDA

#include "linear/linear_act_cuda_torch.h"

#include "linear/torch_cublaslt.h"

namespace mpk {

static void multiply_and_pass(const Cublas& cublas, const LinearActArguments& it, const Matrix& x, const Matrix& weight,
                              const Matrix& y, const Tensor* saved) {
  const bool in_place = it.dtype == Dtype::f32;
  const int64_t block = in_place ? it.rows() : rows_at_once(it.kOp, it.x, it.rows(), it.outputs());
  const OwnMatrix scratch(it.x, in_place ? 0 : block, it.outputs(), aoti_torch_dtype_float32());
  const Strided bias = it.bias ? Strided(it.bias->const_data(), 0, it.bias->strides()[0], it.dtype) : Strided();
  for (int64_t first = 0; first < it.rows(); first += block) {
    const int64_t rows = std::min(block, it.rows() - first);
    const Matrix z = in_place ? y : scratch.view.rows_from(0, rows);
    cublas.multiply(z, x.rows_from(first, rows), weight.transposed());
    require_success(
        bias_act_cuda(it.dtype, static_cast<float*>(z.data), bias, y.at(first),
                      saved ? Matrix(*saved).at(first) : nullptr, rows, it.outputs(), it.activation, cublas.stream()),
        it.kOp);
  }
}

// y and saved in one product. cublasLt's relu is left alone: it makes a 0 of NaN.
static bool multiply_with_ending(const LinearActArguments& it, const Matrix& x, const Matrix& weight, const Matrix& y,
                                 const Tensor* saved, cudaStream_t stream) {
  const bool takes_gelu = it.activation == Activation::gelu_tanh;
  if (it.dtype == Dtype::f32 || it.features() == 0 || !(takes_gelu || it.activation == Activation::none)) return false;
  cublaslt::Ending ending{{}, takes_gelu ? cublaslt::kGelu : 0, {}};
  if (it.bias) ending.bias.emplace(*it.bias);
  if (saved) ending.z.emplace(*saved);
  return multiply_by_cublaslt(it.kOp, it.x, stream, y, x, weight.transposed(), ending);
}

static void linear_act_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActArguments it(stack);
  const OnDeviceOf device(it.x);
  Tensor y = it.new_output(), saved = it.saves_z() ? it.new_output() : it.new_nothing();
  if (y.size() > 0) {
    const Operand x(it.x), weight(it.weight);
    const Tensor* const saves = it.saves_z() ? &saved : nullptr;
    if (it.activation == Activation::none && !it.bias)
      Cublas(it.kOp, it.x, device.stream()).multiply(Matrix(y), x.matrix(), weight.matrix().transposed());
    else if (!multiply_with_ending(it, x.matrix(), weight.matrix(), Matrix(y), saves, device.stream()))
      multiply_and_pass(Cublas(it.kOp, it.x, device.stream()), it, x.matrix(), weight.matrix(), Matrix(y), saves);
  }
  stack[0] = y.release();
  stack[1] = saved.release();
}
MPK_CUDA_KERNEL(LinearActArguments::kOp, linear_act_on_cuda)

// dz in dy's dtype, unless it is null, and dbias.
static void pass_backward(const LinearActBackwardArguments& it, const Matrix& dy, const OwnMatrix* dz,
                          const Tensor& dbias, cudaStream_t stream) {
  const ColumnSums sums(dbias, count_row_blocks(it.rows(), it.outputs()));
  require_success(act_backward_cuda(it.dtype, strided(dy),
                                    saves(it.activation) == Saves::nothing ? Strided() : strided(Matrix(it.saved)),
                                    dz ? dz->view.data : nullptr, /*y=*/nullptr, sums.of_block(0), it.rows(),
                                    it.outputs(), it.activation, stream),
                  it.kOp);
  sums.add_up(it.kOp, stream);
}

static void linear_act_backward_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActBackwardArguments it(stack);
  const OnDeviceOf device(it.dy);
  Tensor dx = it.new_dx(), dweight = it.new_dweight(), dbias = it.new_dbias();
  const Matrix dy(it.dy);
  const bool wants_product = it.wants_dx() || it.wants_dweight();
  std::unique_ptr<OwnMatrix> own_dz;
  if (wants_product && !(it.activation == Activation::none && cublas::is_readable(dy)))
    own_dz = std::make_unique<OwnMatrix>(it.dy, it.rows(), it.outputs(), it.dy.dtype());
  if (it.outputs() > 0 && (own_dz || it.wants_dbias())) pass_backward(it, dy, own_dz.get(), dbias, device.stream());
  if (wants_product) {
    const Matrix& dz = own_dz ? own_dz->view : dy;
    const Cublas cublas(it.kOp, it.dy, device.stream());
    if (it.wants_dx()) cublas.multiply(Matrix(dx), dz, Operand(*it.weight).matrix());
    if (it.wants_dweight()) cublas.multiply(Matrix(dweight), dz.transposed(), Operand(*it.x).matrix());
  }
  stack[0] = dx.release();
  stack[1] = dweight.release();
  stack[2] = dbias.release();
}
MPK_CUDA_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cuda)

}  // namespace mpk

// For `mpkernels doctor`: a line for each op whose products this process ended with cublasLt, an empty line, then one
// for each reason why it ended one otherwise: how often, a space, the op or the reason. Good until the thread calls it
// again.
extern "C" __attribute__((visibility("default"))) const char* mpkernels_cublaslt_notes() {
  static thread_local std::string text;
  auto& notes = mpk::cublaslt::Notes::of_process();
  const std::lock_guard<std::mutex> lock(notes.mutex);
  text.clear();
  for (const auto& [op, count] : notes.products) text += std::to_string(count) + " " + op + "\n";
  text += "\n";
  for (const auto& [refusal, count] : notes.refusals) text += std::to_string(count) + " " + refusal + "\n";
  return text.c_str();
}

#endif
