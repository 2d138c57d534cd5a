// linear_gated's and linear_dgated's arguments, as a kernel takes them off the stack.
#pragma once

#include "linear/linear_act_torch.h"

namespace mpk {

// Both as one matrix, where they are the halves of one.
inline std::optional<Matrix> joined(const Matrix& gate, const Matrix& up) {
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

}  // namespace mpk
