#include "linear/linear_act_torch.h"
#include "linear/passes_cpu_torch.h"
#ifdef MPK_CUDA
#include "linear/passes_cuda_torch.h"
#endif

namespace mpk {

struct LinearDactArguments {
  static constexpr const char* kOp = "linear_dact";

  explicit LinearDactArguments(const StableIValue* stack)
      : dy(stack[0]),
        weight(take_optional(stack[1])),
        saved(stack[2]),
        activation(take_activation(stack[3])),
        bias_dtype(take_optional_dtype(stack[4])),
        wants_h(take_number<bool>(stack[5]) && saves(activation) == Saves::z) {
    require(find_dtype(dy.dtype(), &dtype) && dtype != Dtype::f64, kOp, "dy is none of fp16, bf16, fp32");
    require(is_matrix(dy, -1, -1, dy), kOp, "dy is not a matrix");
    require(!weight || is_matrix(*weight, dy.sizes()[1], -1, dy), kOp, "weight does not fit dy");
    require(saves(activation) == Saves::nothing || is_matrix(saved, rows(), columns(), dy), kOp,
            "saved does not fit dy and weight");
    require_gradient_dtype(bias_dtype, dy, kOp);
  }
  int64_t rows() const { return dy.sizes()[0]; }
  int64_t columns() const { return (weight ? *weight : dy).sizes()[1]; }
  bool wants_dbias() const { return bias_dtype != -1; }

  Tensor dy;
  std::unique_ptr<Tensor> weight;
  Tensor saved;
  Activation activation;
  int32_t bias_dtype;  // torch's number; -1: not wanted
  bool wants_h;
  Dtype dtype;
};

struct Slopes {
  explicit Slopes(const LinearDactArguments& call)
      : dz_tensor(new_matrix(call.dy, call.rows(), call.columns())),
        dbias_tensor(new_dbias(call.dy, call.columns(), call.bias_dtype)),
        h_tensor(new_matrix(call.dy, call.rows(), call.columns(), call.wants_h)),
        dz(dz_tensor),
        dbias(dbias_tensor),
        h(h_tensor) {}
  void return_to(StableIValue* stack) {
    stack[0] = dz_tensor.release();
    stack[1] = dbias_tensor.release();
    stack[2] = h_tensor.release();
  }

  Tensor dz_tensor, dbias_tensor, h_tensor;
  const Matrix dz, dbias, h;
};

// The product is rounded as torch rounds it. dz takes its memory, and is rounded once more. Without a weight, dy is the
// product.
template <class Passes>
static void differentiate_product(const LinearDactArguments& call, const Slopes& to) {
  const Passes passes(call.kOp, call.dy);
  const Matrix dy(call.dy), product = call.weight ? to.dz : dy;
  if (call.weight) multiply(product, dy, Matrix(*call.weight));
  if (to.dz.columns > 0)
    passes.differentiate(call.activation, product,
                         saves(call.activation) == Saves::nothing ? product : Matrix(call.saved), &to.dz,
                         call.wants_h ? &to.h : nullptr, call.wants_dbias() ? &to.dbias : nullptr);
}

// Computes some rows at a time in fp32. Without a row, it writes 0 to dbias.
static void differentiate_in_fp32(const LinearDactArguments& call, const Slopes& to) {
  const Matrix dy(call.dy), &all = to.dz;
  const Widened weight = widen(Matrix(*call.weight)), saved = saves(call.activation) == Saves::nothing
                                                                  ? Widened{all, nullptr}
                                                                  : contiguous(Matrix(call.saved));
  const int64_t block = rows_in_block(all.rows, all.columns);
  const ScratchMatrix scratch(call.dtype == Dtype::f32 ? 0 : block, all.columns, aoti_torch_dtype_float32());
  const BackwardPass pass(call.activation, call.dtype, all.rows, all.columns, call.wants_dbias());
  in_blocks(all.rows, block, [&](int64_t first, int64_t rows) {
    const Matrix dz = all.rows_from(first, rows),
                 product = call.dtype == Dtype::f32 ? dz : scratch.view.rows_from(0, rows),
                 h = call.wants_h ? to.h.rows_from(first, rows) : to.h;
    multiply(product, widen(dy.rows_from(first, rows)).view, weight.view);
    pass.run(first, product, saved.view.rows_from(first, rows), nullptr, &dz, call.wants_h ? &h : nullptr);
  });
  if (call.wants_dbias()) pass.add_up(to.dbias);
}

static void linear_dact_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const LinearDactArguments call(stack);
  Slopes to(call);
  call.weight && !multiplies_halves(call.dtype) ? differentiate_in_fp32(call, to)
                                                : differentiate_product<CpuPasses>(call, to);
  to.return_to(stack);
}
MPK_CPU_KERNEL(LinearDactArguments::kOp, linear_dact_on_cpu)

#ifdef MPK_CUDA
static void linear_dact_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearDactArguments call(stack);
  Slopes to(call);
  differentiate_product<CudaPasses>(call, to);
  to.return_to(stack);
}
MPK_CUDA_KERNEL(LinearDactArguments::kOp, linear_dact_on_cuda)
#endif

}  // namespace mpk
