#include "linear/linear_act_torch.h"

#include "linear/passes_cpu_torch.h"
#ifdef MPK_CUDA
#include "linear/passes_cuda_torch.h"
#endif

namespace mpk {

// Calls compute(arguments, z if it is saved, else null, y), unless y is empty.
template <class Body>
static void forward(StableIValue* stack, const Body& compute) {
  const LinearActArguments call(stack);
  Tensor y = call.new_output(), saved = call.new_output(/*wanted=*/call.saves_z());
  if (y.size() > 0) {
    const Matrix saved_view(saved);
    compute(call, call.saves_z() ? &saved_view : nullptr, Matrix(y));
  }
  stack[0] = y.release();
  stack[1] = saved.release();
}

// torch computes z, rounded as torch rounds it. A pass over z makes y, in z's place unless z is saved.
template <class Passes>
static void activate_product(const LinearActArguments& call, const Matrix& z, const Matrix& y) {
  const Passes passes(call.kOp, call.x);
  multiply_and_add(z, Matrix(call.x), Matrix(call.weight), as_matrix(call.bias));
  if (call.activation != Activation::none) passes.activate(call.activation, z, y);
}

// Computes some rows at a time in fp32. y is rounded once, and so is z, if it is saved.
static void activate_in_fp32(const LinearActArguments& call, const Matrix* saved, const Matrix& y) {
  const Matrix x(call.x);
  const Widened weight = widen(Matrix(call.weight)), bias = contiguous(call.bias ? Matrix(*call.bias) : y);
  const int64_t block = rows_in_block(x.rows, y.columns);
  const ScratchMatrix scratch(call.dtype == Dtype::f32 ? 0 : block, y.columns, aoti_torch_dtype_float32());
  const auto linear_act_rows = MPK_BEST(linear_act_rows);
  in_blocks(x.rows, block, [&](int64_t first, int64_t rows) {
    const Matrix z =
        call.dtype == Dtype::f32 ? (saved ? *saved : y).rows_from(first, rows) : scratch.view.rows_from(0, rows);
    multiply(z, widen(x.rows_from(first, rows)).view, weight.view.transposed());
    parallel_for(rows, z.columns, [&](int64_t begin, int64_t end) {
      const int64_t row = first + begin;
      linear_act_rows({call.activation, z.dtype, call.dtype, z.at(begin), call.bias ? bias.view.data : nullptr,
                       y.at(row), saved ? saved->at(row) : nullptr},
                      end - begin, z.columns);
    });
  });
}

static void linear_act_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  forward(stack, [](const LinearActArguments& call, const Matrix* saved, const Matrix& y) {
    multiplies_halves(call.dtype) ? activate_product<CpuPasses>(call, saved ? *saved : y, y)
                                  : activate_in_fp32(call, saved, y);
  });
}
MPK_CPU_KERNEL(LinearActArguments::kOp, linear_act_on_cpu)

#ifdef MPK_CUDA
static void linear_act_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  forward(stack, [](const LinearActArguments& call, const Matrix* saved, const Matrix& y) {
    activate_product<CudaPasses>(call, saved ? *saved : y, y);
  });
}
MPK_CUDA_KERNEL(LinearActArguments::kOp, linear_act_on_cuda)
#endif

struct Gradients {
  explicit Gradients(const LinearActBackwardArguments& call)
      : dx_tensor(call.new_dx()),
        dweight_tensor(call.new_dweight()),
        dbias_tensor(new_dbias(call.dy, call.outputs(), call.bias_dtype)),
        dx(dx_tensor),
        dbias(dbias_tensor) {}
  void return_to(StableIValue* stack) {
    stack[0] = dx_tensor.release();
    stack[1] = dweight_tensor.release();
    stack[2] = dbias_tensor.release();
  }

  Tensor dx_tensor, dweight_tensor, dbias_tensor;
  const Matrix dx, dbias;
};

// dz is rounded, as torch rounds it, before both products.
template <class Passes>
static void multiply_slopes(const LinearActBackwardArguments& call, const Gradients& to) {
  const Passes passes(call.kOp, call.dy);
  const bool has_slope = saves(call.activation) != Saves::nothing;
  const bool makes_dz = has_slope && (call.wants_dx() || call.wants_dweight());
  const int64_t sizes[] = {makes_dz ? call.rows() : 0, call.outputs()};
  const Tensor dz_memory = call.dy.new_empty(2, sizes, call.dy.dtype());
  const Matrix dy(call.dy), new_dz(dz_memory), dz = makes_dz ? new_dz : dy;
  if (call.outputs() > 0 && (makes_dz || call.wants_dbias()))
    passes.differentiate(call.activation, dy, has_slope ? Matrix(call.saved) : dy, makes_dz ? &new_dz : nullptr,
                         /*y=*/nullptr, call.wants_dbias() ? &to.dbias : nullptr);
  if (call.wants_dx()) multiply(to.dx, dz, Matrix(*call.weight));
  if (!call.wants_dweight()) return;
  // by_columns: the weight is the transpose of a contiguous matrix, and so is its gradient. dweight is that matrix.
  const Matrix x(*call.x), found(to.dweight_tensor), dweight = call.by_columns ? found.transposed() : found,
                                                     left = call.by_columns ? x.transposed() : dz.transposed(),
                                                     right = call.by_columns ? dz : x;
  if (dweight.dtype == call.dtype)
    multiply(dweight, left, right);
  else
    passes.multiply_to_fp32(dweight, left, right);
}

// Adds what some rows of dz and x contribute to dweight. The first rows overwrite dweight.
static void multiply_dweight(bool by_columns, const Matrix& dweight, const Matrix& dz, const Matrix& x, int64_t first) {
  const Matrix left = (by_columns ? x : dz).transposed(), &right = by_columns ? dz : x;
  first == 0 ? multiply(dweight, left, right) : multiply_onto(dweight, left, right, /*c=*/nullptr);
}

// Computes some rows at a time in fp32. Without a row, it writes 0 to dweight and dbias.
static void slopes_in_fp32(const LinearActBackwardArguments& call, const Gradients& to) {
  const int32_t fp32 = aoti_torch_dtype_float32();
  const bool has_slope = saves(call.activation) != Saves::nothing;
  const bool is_dz_dy = !has_slope && call.dtype == Dtype::f32;  // then torch makes both products, of dy itself
  const Matrix dweight = call.by_columns ? Matrix(to.dweight_tensor).transposed() : Matrix(to.dweight_tensor);
  if (is_dz_dy && call.wants_dx()) multiply(to.dx, Matrix(call.dy), Matrix(*call.weight));
  if (is_dz_dy && call.wants_dweight())
    multiply_dweight(call.by_columns, dweight, Matrix(call.dy), Matrix(*call.x), /*first=*/0);
  const bool makes_dx = !is_dz_dy && call.wants_dx(), makes_dweight = !is_dz_dy && call.wants_dweight();
  const bool makes_dz = makes_dx || makes_dweight;
  if (!makes_dz && !call.wants_dbias()) return;

  const Widened dy = contiguous(Matrix(call.dy)), saved = has_slope ? contiguous(Matrix(call.saved)) : dy.borrowed(),
                weight = makes_dx ? widen(Matrix(*call.weight)) : dy.borrowed();
  const BackwardPass pass(call.activation, call.dtype, call.rows(), call.outputs(), call.wants_dbias());
  const int64_t block = rows_in_block(call.rows(), call.outputs());
  const bool narrows_dx = makes_dx && call.dtype != Dtype::f32;
  const bool narrows_dweight = makes_dweight && dweight.dtype != Dtype::f32;
  const ScratchMatrix wide_dz(makes_dz ? block : 0, call.outputs(), fp32);
  const ScratchMatrix wide_dx(narrows_dx ? block : 0, to.dx.columns, fp32);
  const ScratchMatrix wide_dweight(narrows_dweight ? dweight.rows : 0, dweight.columns, fp32);
  in_blocks(call.rows(), block, [&](int64_t first, int64_t rows) {
    const Matrix dz = wide_dz.view.rows_from(0, rows);
    pass.run(first, dy.view.rows_from(first, rows), saved.view.rows_from(first, rows), makes_dz ? &dz : nullptr,
             /*narrow_dz=*/nullptr, /*y=*/nullptr);
    if (makes_dx) {
      const Matrix narrow_dx = to.dx.rows_from(first, rows),
                   dx = narrows_dx ? wide_dx.view.rows_from(0, rows) : narrow_dx;
      multiply(dx, dz, weight.view);
      if (narrows_dx) narrow(dx, narrow_dx);
    }
    if (makes_dweight)
      multiply_dweight(call.by_columns, narrows_dweight ? wide_dweight.view : dweight, dz,
                       widen(Matrix(*call.x).rows_from(first, rows)).view, first);
  });
  if (narrows_dweight) narrow(wide_dweight.view, dweight);
  if (call.wants_dbias()) pass.add_up(to.dbias);
}

static void linear_act_backward_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActBackwardArguments call(stack);
  Gradients to(call);
  if (multiplies_halves(call.dtype))
    multiply_slopes<CpuPasses>(call, to);
  else
    slopes_in_fp32(call, to);
  to.return_to(stack);
}
MPK_CPU_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cpu)

#ifdef MPK_CUDA
static void linear_act_backward_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActBackwardArguments call(stack);
  Gradients to(call);
  multiply_slopes<CudaPasses>(call, to);
  to.return_to(stack);
}
MPK_CUDA_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cuda)
#endif

}  // namespace mpk

// Tells selector/table.py whether this CPU's 16-bit products are left to torch. dtype is a Dtype.
extern "C" __attribute__((visibility("default"))) int32_t mpkernels_multiplies_halves(int32_t dtype) {
  return mpk::multiplies_halves(static_cast<mpk::Dtype>(dtype));
}
