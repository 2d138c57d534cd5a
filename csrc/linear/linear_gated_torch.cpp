#include "linear/linear_gated_torch.h"

#include "linear/passes_cpu_torch.h"
#ifdef MPK_CUDA
#include "linear/passes_cuda_torch.h"
#endif

namespace mpk {

// z is torch's products, one where both weights are halves of one, rounded as torch rounds them; h is a pass over z.
template <class Passes>
static void gate_products(const LinearGatedArguments& it, const Matrix& z, const Matrix& h) {
  const Passes passes(it.kOp, it.x);
  const Matrix x(it.x), gate(it.gate_weight), up(it.up_weight);
  const std::optional<Matrix> gate_bias = as_matrix(it.gate_bias), up_bias = as_matrix(it.up_bias);
  std::optional<Matrix> weight = joined(gate, up), bias;
  if (gate_bias && up_bias) bias = joined(gate_bias->transposed(), up_bias->transposed());
  if (bias) bias = bias->transposed();
  if (weight && (bias || !(gate_bias || up_bias))) {
    multiply_and_add(z, x, *weight, bias);
  } else {
    multiply_and_add(z.columns_from(0, h.columns), x, gate, gate_bias);
    multiply_and_add(z.columns_from(h.columns, h.columns), x, up, up_bias);
  }
  passes.gate(it.activation, z, h);
}

// Computes some rows at a time in fp32. h is rounded once, and so is z, if it is saved.
static void gate_in_fp32(const LinearGatedArguments& it, const Matrix* saved, const Matrix& h) {
  const Matrix x(it.x), of_gate(it.gate_weight), of_up(it.up_weight);
  const auto both = joined(of_gate, of_up);
  const Widened gate = widen(both ? *both : of_gate), up = both ? gate.borrowed() : widen(of_up),
                gate_bias = contiguous(it.gate_bias ? Matrix(*it.gate_bias) : h),
                up_bias = contiguous(it.up_bias ? Matrix(*it.up_bias) : h);
  const int64_t columns = 2 * h.columns, block = std::min(rows_in_block(columns), x.rows);
  const bool in_place = it.dtype == Dtype::f32 && saved;
  const ScratchMatrix scratch(in_place ? 0 : block, columns, aoti_torch_dtype_float32());
  const auto linear_gated_rows = MPK_BEST(linear_gated_rows);
  for (int64_t first = 0; first < x.rows; first += block) {
    const int64_t rows = std::min(block, x.rows - first);
    const Matrix z = in_place ? saved->rows_from(first, rows) : scratch.view.rows_from(0, rows);
    const Widened part = widen(x.rows_from(first, rows));
    if (both) {
      multiply(z, part.view, gate.view.transposed());
    } else {
      multiply(z.columns_from(0, h.columns), part.view, gate.view.transposed());
      multiply(z.columns_from(h.columns, h.columns), part.view, up.view.transposed());
    }
    parallel_for(rows, columns, [&](int64_t begin, int64_t end) {
      const int64_t row = first + begin;
      linear_gated_rows({it.activation, z.dtype, it.dtype, z.at(begin), it.gate_bias ? gate_bias.view.data : nullptr,
                         it.up_bias ? up_bias.view.data : nullptr, h.at(row), saved ? saved->at(row) : nullptr},
                        end - begin, h.columns);
    });
  }
}

// makes_z: compute needs z, whether it is saved or not.
template <class Body>
static void forward(StableIValue* stack, bool makes_z, const LinearGatedArguments& it, const Body& compute) {
  Tensor h = it.new_h(), z = it.new_z(/*wanted=*/it.save || makes_z);
  if (h.size() > 0) compute(Matrix(z), Matrix(h));
  stack[0] = h.release();
  stack[1] = it.save ? z.release() : it.new_z(/*wanted=*/false).release();
}

static void linear_gated_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const LinearGatedArguments it(stack);
  const bool in_halves = multiplies_halves(it.dtype);
  forward(stack, in_halves, it, [&](const Matrix& z, const Matrix& h) {
    in_halves ? gate_products<CpuPasses>(it, z, h) : gate_in_fp32(it, it.save ? &z : nullptr, h);
  });
}
MPK_CPU_KERNEL(LinearGatedArguments::kOp, linear_gated_on_cpu)

#ifdef MPK_CUDA
static void linear_gated_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearGatedArguments it(stack);
  forward(stack, /*makes_z=*/true, it, [&](const Matrix& z, const Matrix& h) { gate_products<CudaPasses>(it, z, h); });
}
MPK_CUDA_KERNEL(LinearGatedArguments::kOp, linear_gated_on_cuda)
#endif

// dh is torch's product, rounded as torch rounds it, or given.
template <class Passes>
static void differentiate_product(const LinearDgatedArguments& it, const Matrix& dz, const Matrix* h) {
  const Passes passes(it.kOp, it.z);
  const int64_t sizes[] = {it.weight ? it.rows() : 0, it.columns()};
  const Tensor product = it.z.new_empty(2, sizes, it.z.dtype());
  if (it.weight) multiply(Matrix(product), Matrix(it.dy), Matrix(*it.weight));
  passes.differentiate_gate(it.activation, Matrix(it.weight ? product : it.dy), Matrix(it.z), dz, h);
}

// Computes some rows at a time in fp32.
static void differentiate_in_fp32(const LinearDgatedArguments& it, const Matrix& dz, const Matrix* h) {
  const CpuPasses passes(it.kOp, it.z);
  const Matrix dy(it.dy);
  const Widened weight = widen(Matrix(*it.weight)), z = contiguous(Matrix(it.z));
  const int64_t block = std::min(rows_in_block(it.columns()), it.rows());
  const ScratchMatrix dh(block, it.columns(), aoti_torch_dtype_float32());
  for (int64_t first = 0; first < it.rows(); first += block) {
    const int64_t rows = std::min(block, it.rows() - first);
    const Matrix part = dh.view.rows_from(0, rows), of_h = h ? h->rows_from(first, rows) : part;
    multiply(part, widen(dy.rows_from(first, rows)).view, weight.view);
    passes.differentiate_gate(it.activation, part, z.view.rows_from(first, rows), dz.rows_from(first, rows),
                              h ? &of_h : nullptr);
  }
}

template <class Body>
static void backward(StableIValue* stack, const Body& compute) {
  const LinearDgatedArguments it(stack);
  Tensor dz = it.new_dz(), h = it.new_h();
  if (dz.size() > 0) {
    const Matrix of_h(h);
    compute(it, Matrix(dz), it.wants_h ? &of_h : nullptr);
  }
  stack[0] = dz.release();
  stack[1] = h.release();
}

static void linear_dgated_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  backward(stack, [](const LinearDgatedArguments& it, const Matrix& dz, const Matrix* h) {
    it.weight && !multiplies_halves(it.dtype) ? differentiate_in_fp32(it, dz, h)
                                              : differentiate_product<CpuPasses>(it, dz, h);
  });
}
MPK_CPU_KERNEL(LinearDgatedArguments::kOp, linear_dgated_on_cpu)

#ifdef MPK_CUDA
static void linear_dgated_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  backward(stack, differentiate_product<CudaPasses>);
}
MPK_CUDA_KERNEL(LinearDgatedArguments::kOp, linear_dgated_on_cuda)
#endif

}  // namespace mpk
