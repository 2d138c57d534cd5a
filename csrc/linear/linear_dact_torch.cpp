#include "linear/linear_dact_torch.h"

#include "linear/passes_cpu_torch.h"
#ifdef MPK_CUDA
#include "linear/passes_cuda_torch.h"
#endif

namespace mpk {

// The product is rounded as torch rounds it, and dz once more, in its place.
template <class Passes>
static void differentiate_product(const LinearDactArguments& it, const Slopes& to) {
  const Passes passes(it.kOp, it.dy);
  multiply(to.dz, Matrix(it.dy), Matrix(it.weight));
  if (to.dz.columns > 0)
    passes.differentiate(it.activation, to.dz, saves(it.activation) == Saves::nothing ? to.dz : Matrix(it.saved),
                         &to.dz, it.wants_h ? &to.h : nullptr, it.wants_dbias() ? &to.dbias : nullptr);
}

// Computes some rows at a time in fp32. There is one block at least: without a row, it writes 0 to dbias.
static void differentiate_in_fp32(const LinearDactArguments& it, const Slopes& to) {
  const Matrix dy(it.dy), &all = to.dz;
  const Widened weight = widen(Matrix(it.weight)),
                saved = saves(it.activation) == Saves::nothing ? Widened{all, nullptr} : contiguous(Matrix(it.saved));
  const int64_t block = std::max<int64_t>(1, std::min(rows_in_block(all.columns), all.rows));
  const ScratchMatrix scratch(it.dtype == Dtype::f32 ? 0 : block, all.columns, aoti_torch_dtype_float32());
  const BackwardPass pass(it.activation, it.dtype, all.rows, all.columns, it.wants_dbias());
  int64_t first = 0;
  do {
    const int64_t rows = std::min(block, all.rows - first);
    const Matrix dz = all.rows_from(first, rows),
                 product = it.dtype == Dtype::f32 ? dz : scratch.view.rows_from(0, rows),
                 h = it.wants_h ? to.h.rows_from(first, rows) : to.h;
    multiply(product, widen(dy.rows_from(first, rows)).view, weight.view);
    pass.run(first, product, saved.view.rows_from(first, rows), nullptr, &dz, it.wants_h ? &h : nullptr);
    first += block;
  } while (first < all.rows);
  if (it.wants_dbias()) pass.add_up(to.dbias);
}

static void linear_dact_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const LinearDactArguments it(stack);
  Slopes to(it);
  multiplies_halves(it.dtype) ? differentiate_product<CpuPasses>(it, to) : differentiate_in_fp32(it, to);
  to.return_to(stack);
}
MPK_CPU_KERNEL(LinearDactArguments::kOp, linear_dact_on_cpu)

#ifdef MPK_CUDA
void differentiate_product_on_cuda(const LinearDactArguments& it, const Slopes& to) {
  differentiate_product<CudaPasses>(it, to);
}
static void linear_dact_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearDactArguments it(stack);
  Slopes to(it);
  differentiate_product_on_cuda(it, to);
  to.return_to(stack);
}
MPK_CUDA_KERNEL(LinearDactArguments::kOp, linear_dact_on_cuda)
#endif

}  // namespace mpk
