// linear_dact's arguments, as a kernel takes them off the stack.
#pragma once

#include "linear/linear_act_torch.h"

namespace mpk {

struct LinearDactArguments {
  static constexpr const char* kOp = "linear_dact";

  explicit LinearDactArguments(const StableIValue* stack)
      : dy(stack[0]),
        weight(stack[1]),
        saved(stack[2]),
        activation(take_activation(stack[3])),
        bias_dtype(take_optional_dtype(stack[4])),
        wants_h(take_number<bool>(stack[5]) && saves(activation) == Saves::z) {
    require(find_dtype(dy.dtype(), &dtype) && dtype != Dtype::f64, kOp, "dy is none of fp16, bf16, fp32");
    require(is_matrix(dy, -1, -1, dy), kOp, "dy is not a matrix");
    require(is_matrix(weight, dy.sizes()[1], -1, dy), kOp, "weight does not fit dy");
    require(saves(activation) == Saves::nothing || is_matrix(saved, rows(), columns(), dy), kOp,
            "saved does not fit dy and weight");
    require_gradient_dtype(bias_dtype, dy, kOp);
  }
  int64_t rows() const { return dy.sizes()[0]; }
  int64_t columns() const { return weight.sizes()[1]; }
  bool wants_dbias() const { return bias_dtype != -1; }
  Tensor new_dz() const { return new_matrix(dy, rows(), columns()); }
  Tensor new_h() const { return new_matrix(dy, rows(), columns(), wants_h); }
  Tensor new_dbias() const { return mpk::new_dbias(dy, columns(), bias_dtype); }

  Tensor dy, weight, saved;
  Activation activation;
  int32_t bias_dtype;  // of torch's; -1: not wanted
  bool wants_h;
  Dtype dtype;
};

struct Slopes {
  explicit Slopes(const LinearDactArguments& it)
      : of_z(it.new_dz()), of_bias(it.new_dbias()), of_h(it.new_h()), dz(of_z), dbias(of_bias), h(of_h) {}
  void return_to(StableIValue* stack) {
    stack[0] = of_z.release();
    stack[1] = of_bias.release();
    stack[2] = of_h.release();
  }

  Tensor of_z, of_bias, of_h;
  const Matrix dz, dbias, h;
};

void differentiate_product_on_cuda(const LinearDactArguments& it, const Slopes& to);

}  // namespace mpk
