#include "linear/linear_act_torch.h"
#include "linear/passes_cpu_torch.h"
#ifdef MPK_CUDA
#include "linear/passes_cuda_torch.h"
#endif

namespace mpk {

// Returns gate and up as one matrix, if up follows gate in memory.
static std::optional<Matrix> joined(const Matrix& gate, const Matrix& up) {
  if (gate.row_stride != up.row_stride || gate.column_stride != up.column_stride || gate.at(gate.rows) != up.data)
    return std::nullopt;
  return gate.rows_from(0, 2 * gate.rows);
}

struct LinearGatedArguments {
  static constexpr const char* kOp = "linear_gated";

  explicit LinearGatedArguments(const StableIValue* stack)
      : x(stack[0]),
        gate_weight(stack[1]),
        up_weight(stack[2]),
        gate_bias(take_optional(stack[3])),
        up_bias(take_optional(stack[4])),
        activation(take_activation(stack[5])),
        save(take_number<bool>(stack[6])) {
    require(find_dtype(x.dtype(), &dtype) && dtype != Dtype::f64, kOp, "x is none of fp16, bf16, fp32");
    require(is_matrix(x, -1, -1, x), kOp, "x is not a matrix");
    require(is_matrix(gate_weight, -1, x.sizes()[1], x), kOp, "gate_weight does not fit x");
    require(is_matrix(up_weight, outputs(), x.sizes()[1], x), kOp, "up_weight does not fit gate_weight");
    require(is_bias(gate_bias, outputs(), x), kOp, "gate_bias does not fit gate_weight");
    require(is_bias(up_bias, outputs(), x), kOp, "up_bias does not fit up_weight");
  }
  int64_t rows() const { return x.sizes()[0]; }
  int64_t outputs() const { return gate_weight.sizes()[0]; }
  Tensor new_h() const { return new_matrix(x, rows(), outputs()); }
  Tensor new_z(bool wanted) const { return new_matrix(x, rows(), 2 * outputs(), wanted); }

  Tensor x, gate_weight, up_weight;
  std::unique_ptr<Tensor> gate_bias, up_bias;
  Activation activation;
  bool save;
  Dtype dtype;
};

struct LinearDgatedArguments {
  static constexpr const char* kOp = "linear_dgated";

  explicit LinearDgatedArguments(const StableIValue* stack)
      : dy(stack[0]),
        weight(take_optional(stack[1])),
        z(stack[2]),
        activation(take_activation(stack[3])),
        wants_h(take_number<bool>(stack[4])) {
    require(find_dtype(z.dtype(), &dtype) && dtype != Dtype::f64, kOp, "z is none of fp16, bf16, fp32");
    require(is_matrix(z, -1, -1, z) && z.sizes()[1] % 2 == 0, kOp, "z is no matrix of gate and up");
    require(is_matrix(dy, rows(), weight ? -1 : columns(), z), kOp, "dy does not fit z");
    require(!weight || is_matrix(*weight, dy.sizes()[1], columns(), z), kOp, "weight does not fit dy and z");
  }
  int64_t rows() const { return z.sizes()[0]; }
  int64_t columns() const { return z.sizes()[1] / 2; }
  Tensor new_dz() const { return new_matrix(z, rows(), 2 * columns()); }
  Tensor new_h() const { return new_matrix(z, rows(), columns(), wants_h); }

  Tensor dy;
  std::unique_ptr<Tensor> weight;
  Tensor z;
  Activation activation;
  bool wants_h;
  Dtype dtype;
};

// torch makes z, rounded as torch rounds, in one product if the weights are halves of one matrix. A pass makes h.
template <class Passes>
static void gate_products(const LinearGatedArguments& call, const Matrix& z, const Matrix& h) {
  const Passes passes(call.kOp, call.x);
  const Matrix x(call.x), gate(call.gate_weight), up(call.up_weight);
  const std::optional<Matrix> gate_bias = as_matrix(call.gate_bias), up_bias = as_matrix(call.up_bias);
  std::optional<Matrix> weight = joined(gate, up), bias;
  if (gate_bias && up_bias) bias = joined(gate_bias->transposed(), up_bias->transposed());
  if (bias) bias = bias->transposed();
  if (weight && (bias || !(gate_bias || up_bias))) {
    multiply_and_add(z, x, *weight, bias);
  } else {
    multiply_and_add(z.columns_from(0, h.columns), x, gate, gate_bias);
    multiply_and_add(z.columns_from(h.columns, h.columns), x, up, up_bias);
  }
  passes.gate(call.activation, z, h);
}

// Computes some rows at a time in fp32. h is rounded once, and so is z, if it is saved.
static void gate_in_fp32(const LinearGatedArguments& call, const Matrix* saved, const Matrix& h) {
  const Matrix x(call.x), gate_weight(call.gate_weight), up_weight(call.up_weight);
  const auto both = joined(gate_weight, up_weight);
  const Widened gate = widen(both ? *both : gate_weight), up = both ? gate.borrowed() : widen(up_weight),
                gate_bias = contiguous(call.gate_bias ? Matrix(*call.gate_bias) : h),
                up_bias = contiguous(call.up_bias ? Matrix(*call.up_bias) : h);
  const int64_t columns = 2 * h.columns, block = rows_in_block(x.rows, columns);
  const bool in_place = call.dtype == Dtype::f32 && saved;
  const ScratchMatrix scratch(in_place ? 0 : block, columns, aoti_torch_dtype_float32());
  const auto linear_gated_rows = MPK_BEST(linear_gated_rows);
  in_blocks(x.rows, block, [&](int64_t first, int64_t rows) {
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
      linear_gated_rows(
          {call.activation, z.dtype, call.dtype, z.at(begin), call.gate_bias ? gate_bias.view.data : nullptr,
           call.up_bias ? up_bias.view.data : nullptr, h.at(row), saved ? saved->at(row) : nullptr},
          end - begin, h.columns);
    });
  });
}

// makes_z: compute needs z, even if z isn't saved.
template <class Body>
static void forward(StableIValue* stack, bool makes_z, const LinearGatedArguments& call, const Body& compute) {
  Tensor h = call.new_h(), z = call.new_z(/*wanted=*/call.save || makes_z);
  if (h.size() > 0) compute(Matrix(z), Matrix(h));
  stack[0] = h.release();
  stack[1] = call.save ? z.release() : call.new_z(/*wanted=*/false).release();
}

static void linear_gated_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const LinearGatedArguments call(stack);
  const bool in_halves = multiplies_halves(call.dtype);
  forward(stack, in_halves, call, [&](const Matrix& z, const Matrix& h) {
    in_halves ? gate_products<CpuPasses>(call, z, h) : gate_in_fp32(call, call.save ? &z : nullptr, h);
  });
}
MPK_CPU_KERNEL(LinearGatedArguments::kOp, linear_gated_on_cpu)

#ifdef MPK_CUDA
static void linear_gated_on_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const LinearGatedArguments call(stack);
  forward(stack, /*makes_z=*/true, call,
          [&](const Matrix& z, const Matrix& h) { gate_products<CudaPasses>(call, z, h); });
}
MPK_CUDA_KERNEL(LinearGatedArguments::kOp, linear_gated_on_cuda)
#endif

// dh is torch's product, rounded as torch rounds it; without a weight, dh is dy. h takes its memory.
template <class Passes>
static void differentiate_product(const LinearDgatedArguments& call, const Matrix& dz, const Matrix* h) {
  const Passes passes(call.kOp, call.z);
  const Tensor memory = new_matrix(call.z, call.rows(), call.columns(), /*wanted=*/call.weight && !h);
  const Matrix dy(call.dy), product = h ? *h : Matrix(memory), dh = call.weight ? product : dy;
  if (call.weight) multiply(product, dy, Matrix(*call.weight));
  passes.differentiate_gate(call.activation, dh, Matrix(call.z), dz, h);
}

// Computes some rows at a time in fp32.
static void differentiate_in_fp32(const LinearDgatedArguments& call, const Matrix& dz, const Matrix* h) {
  const CpuPasses passes(call.kOp, call.z);
  const Matrix dy(call.dy);
  const Widened weight = widen(Matrix(*call.weight)), z = contiguous(Matrix(call.z));
  const int64_t block = rows_in_block(call.rows(), call.columns());
  const ScratchMatrix dh(block, call.columns(), aoti_torch_dtype_float32());
  in_blocks(call.rows(), block, [&](int64_t first, int64_t rows) {
    const Matrix part = dh.view.rows_from(0, rows), h_part = h ? h->rows_from(first, rows) : part;
    multiply(part, widen(dy.rows_from(first, rows)).view, weight.view);
    passes.differentiate_gate(call.activation, part, z.view.rows_from(first, rows), dz.rows_from(first, rows),
                              h ? &h_part : nullptr);
  });
}

template <class Body>
static void backward(StableIValue* stack, const Body& compute) {
  const LinearDgatedArguments call(stack);
  Tensor dz = call.new_dz(), h = call.new_h();
  if (dz.size() > 0) {
    const Matrix h_view(h);
    compute(call, Matrix(dz), call.wants_h ? &h_view : nullptr);
  }
  stack[0] = dz.release();
  stack[1] = h.release();
}

static void linear_dgated_on_cpu(StableIValue* stack, uint64_t, uint64_t) {
  backward(stack, [](const LinearDgatedArguments& call, const Matrix& dz, const Matrix* h) {
    call.weight && !multiplies_halves(call.dtype) ? differentiate_in_fp32(call, dz, h)
                                                  : differentiate_product<CpuPasses>(call, dz, h);
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
