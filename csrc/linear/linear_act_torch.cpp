#include "linear/linear_act_torch.h"

#include "linear/passes_cpu_torch.h"
#ifdef MPK_CUDA
#include "linear/passes_cuda_torch.h"
#endif

namespace mpk {

// z is torch's product, rounded as torch rounds it; y is a pass over z, and where nobody saves z, in its place.
template <class Passes>
static void activate_product(const LinearActArguments& it, const Matrix& z, const Matrix& y) {
  const Passes passes(it.kOp, it.x);
  multiply_and_add(z, Matrix(it.x), Matrix(it.weight), as_matrix(it.bias));
  if (it.activation != Activation::none) passes.activate(it.activation, z, y);
}

// Computes some rows at a time in fp32. y is rounded once, and so is z, if it is saved.
static void activate_in_fp32(const LinearActArguments& it, const Matrix* saved, const Matrix& y) {
  const Matrix x(it.x);
  const Widened weight = widen(Matrix(it.weight)), bias = contiguous(it.bias ? Matrix(*it.bias) : y);
  const int64_t block = std::min(rows_in_block(y.columns), x.rows);
  const ScratchMatrix scratch(it.dtype == Dtype::f32 ? 0 : block, y.columns, aoti_torch_dtype_float32());
  const auto linear_act_rows = MPK_BEST(linear_act_rows);
  for (int64_t first = 0; first < x.rows; first += block) {
    const int64_t rows = std::min(block, x.rows - first);
    const Matrix z =
        it.dtype == Dtype::f32 ? (saved ? *saved : y).rows_from(first, rows) : scratch.view.rows_from(0, rows);
    multiply(z, widen(x.rows_from(first, rows)).view, weight.view.transposed());
    parallel_for(rows, z.columns, [&](int64_t begin, int64_t end) {
      const int64_t row = first + begin;
      linear_act_rows({it.activation, z.dtype, it.dtype, z.at(begin), it.bias ? bias.view.data : nullptr, y.at(row),
                       saved ? saved->at(row) : nullptr},
                      end - begin, z.columns);
    });
  }
}

static void linear_act_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  forward(stack, [](const LinearActArguments& it, const Matrix* saved, const Matrix& y) {
    multiplies_halves(it.dtype) ? activate_product<CpuPasses>(it, saved ? *saved : y, y)
                                : activate_in_fp32(it, saved, y);
  });
}
MPK_CPU_KERNEL(LinearActArguments::kOp, linear_act_on_cpu)

#ifdef MPK_CUDA
void activate_product_on_cuda(const LinearActArguments& it, const Matrix& z, const Matrix& y) {
  activate_product<CudaPasses>(it, z, y);
}
static void linear_act_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  forward(stack, [](const LinearActArguments& it, const Matrix* saved, const Matrix& y) {
    activate_product_on_cuda(it, saved ? *saved : y, y);
  });
}
MPK_CUDA_KERNEL(LinearActArguments::kOp, linear_act_on_cuda)
#endif

struct Gradients {
  explicit Gradients(const LinearActBackwardArguments& it)
      : of_x(it.new_dx()), of_weight(it.new_dweight()), of_bias(it.new_dbias()), dx(of_x), dbias(of_bias) {}
  void return_to(StableIValue* stack) {
    stack[0] = of_x.release();
    stack[1] = of_weight.release();
    stack[2] = of_bias.release();
  }

  Tensor of_x, of_weight, of_bias;
  const Matrix dx, dbias;
};

// dz is rounded as torch rounds it, on its way to both products.
template <class Passes>
static void multiply_slopes(const LinearActBackwardArguments& it, const Gradients& to) {
  const Passes passes(it.kOp, it.dy);
  const bool has_slope = saves(it.activation) != Saves::nothing;
  const bool makes_dz = has_slope && (it.wants_dx() || it.wants_dweight());
  const int64_t sizes[] = {makes_dz ? it.rows() : 0, it.outputs()};
  const Tensor own = it.dy.new_empty(2, sizes, it.dy.dtype());
  const Matrix dy(it.dy), own_dz(own), dz = makes_dz ? own_dz : dy;
  if (it.outputs() > 0 && (makes_dz || it.wants_dbias()))
    passes.differentiate(it.activation, dy, has_slope ? Matrix(it.saved) : dy, makes_dz ? &own_dz : nullptr,
                         /*y=*/nullptr, it.wants_dbias() ? &to.dbias : nullptr);
  if (it.wants_dx()) multiply(to.dx, dz, Matrix(*it.weight));
  if (!it.wants_dweight()) return;
  // dweight is transposed where the weight is, so that its rows lie in line, too.
  const Matrix x(*it.x), found(to.of_weight), dweight = it.by_columns ? found.transposed() : found,
                                              left = it.by_columns ? x.transposed() : dz.transposed(),
                                              right = it.by_columns ? dz : x;
  if (dweight.dtype == it.dtype)
    multiply(dweight, left, right);
  else
    passes.multiply_to_fp32(dweight, left, right);
}

// Computes some rows at a time in fp32. There is one block at least: without a row, it writes 0 to dweight and dbias.
class SlopesInFp32 {
 public:
  SlopesInFp32(const LinearActBackwardArguments& it, const Gradients& to)
      : it_(it),
        to_(to),
        dweight_(it.by_columns ? Matrix(to.of_weight).transposed() : Matrix(to.of_weight)),
        is_dz_dy_(saves(it.activation) == Saves::nothing && it.dtype == Dtype::f32),
        dy_(is_dz_dy_ && !it.wants_dbias() ? Widened{Matrix(it.dy), nullptr} : contiguous(Matrix(it.dy))),
        saved_(saves(it.activation) == Saves::nothing ? dy_.borrowed() : contiguous(Matrix(it.saved))),
        pass_(it.activation, it.dtype, it.rows(), it.outputs(), it.wants_dbias()) {
    if (is_dz_dy_) {
      if (it.wants_dx()) multiply(to.dx, Matrix(it.dy), Matrix(*it.weight));
      if (it.wants_dweight()) multiply_dweight(dweight_, Matrix(it.dy), Matrix(*it.x), /*first=*/0);
    }
    in_blocks(it.wants_dx() && !is_dz_dy_, it.wants_dweight() && !is_dz_dy_);
    if (it.wants_dbias()) pass_.add_up(to.dbias);
  }

 private:
  void in_blocks(bool makes_dx, bool makes_dweight) const {
    const bool makes_dz = makes_dx || makes_dweight;
    if (!makes_dz && !it_.wants_dbias()) return;
    const int32_t fp32 = aoti_torch_dtype_float32();
    const int64_t block = std::max<int64_t>(1, std::min(rows_in_block(it_.outputs()), it_.rows()));
    const Widened weight = makes_dx ? widen(Matrix(*it_.weight)) : dy_.borrowed();
    const bool narrows_dx = makes_dx && it_.dtype != Dtype::f32;
    const bool narrows_dweight = makes_dweight && dweight_.dtype != Dtype::f32;
    const ScratchMatrix wide_dz(makes_dz ? block : 0, it_.outputs(), fp32);
    const ScratchMatrix wide_dx(narrows_dx ? block : 0, to_.dx.columns, fp32);
    const ScratchMatrix wide_dweight(narrows_dweight ? dweight_.rows : 0, dweight_.columns, fp32);
    int64_t first = 0;
    do {
      const int64_t rows = std::min(block, it_.rows() - first);
      const Matrix dz = wide_dz.view.rows_from(0, rows);
      pass_.run(first, dy_.view.rows_from(first, rows), saved_.view.rows_from(first, rows), makes_dz ? &dz : nullptr,
                /*narrow_dz=*/nullptr, /*y=*/nullptr);
      if (makes_dx) {
        const Matrix to = to_.dx.rows_from(first, rows), dx = narrows_dx ? wide_dx.view.rows_from(0, rows) : to;
        multiply(dx, dz, weight.view);
        if (narrows_dx) narrow(dx, to);
      }
      if (makes_dweight)
        multiply_dweight(narrows_dweight ? wide_dweight.view : dweight_, dz,
                         widen(Matrix(*it_.x).rows_from(first, rows)).view, first);
      first += block;
    } while (first < it_.rows());
    if (narrows_dweight) narrow(wide_dweight.view, dweight_);
  }

  // Adds what some rows of dz and x contribute to dweight. The first rows overwrite it.
  void multiply_dweight(const Matrix& dweight, const Matrix& dz, const Matrix& x, int64_t first) const {
    const Matrix left = (it_.by_columns ? x : dz).transposed(), &right = it_.by_columns ? dz : x;
    first == 0 ? multiply(dweight, left, right) : multiply_onto(dweight, left, right, dweight.tensor());
  }

  const LinearActBackwardArguments& it_;
  const Gradients& to_;
  const Matrix dweight_;  // transposed where the weight is, so that its rows lie in line, too
  const bool is_dz_dy_;
  const Widened dy_, saved_;
  const BackwardPass pass_;
};

static void linear_act_backward_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActBackwardArguments it(stack);
  Gradients to(it);
  if (multiplies_halves(it.dtype))
    multiply_slopes<CpuPasses>(it, to);
  else
    SlopesInFp32(it, to);
  to.return_to(stack);
}
MPK_CPU_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cpu)

#ifdef MPK_CUDA
static void linear_act_backward_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearActBackwardArguments it(stack);
  Gradients to(it);
  multiply_slopes<CudaPasses>(it, to);
  to.return_to(stack);
}
MPK_CUDA_KERNEL(LinearActBackwardArguments::kOp, linear_act_backward_on_cuda)
#endif

}  // namespace mpk

// Tells selector/rule.py whether this CPU's 16-bit products are left to torch. dtype is a Dtype.
extern "C" __attribute__((visibility("default"))) int32_t mpkernels_multiplies_halves(int32_t dtype) {
  return mpk::multiplies_halves(static_cast<mpk::Dtype>(dtype));
}
