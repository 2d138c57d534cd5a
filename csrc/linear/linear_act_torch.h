// linear_act's arguments, as a kernel takes them off the stack, and helpers that all linear ops share. If arguments are
// refused here, Python works out what to tell the user.
#pragma once

#include <optional>

#include "common/chunks_torch.h"
#include "common/registration_torch.h"
#include "common/stream_torch.h"
#include "linear/activation.h"
#include "linear/matrix.h"

namespace mpk {

inline Activation take_activation(StableIValue value) {
  const std::string name = take_string(value);
  const auto found = std::find(std::begin(kActivationNames), std::end(kActivationNames), name);
  require(found != std::end(kActivationNames), "linear_act", "activation is unknown");
  return static_cast<Activation>(found - std::begin(kActivationNames));
}

inline bool is_matrix(const Tensor& tensor, int64_t rows, int64_t columns, const Tensor& like) {
  return tensor.is_strided() && tensor.ndim() == 2 && (rows < 0 || tensor.sizes()[0] == rows) &&
         (columns < 0 || tensor.sizes()[1] == columns) && tensor.dtype() == like.dtype() &&
         tensor.device() == like.device();
}

// Whether `bias` is null or a vector of that size.
inline bool is_bias(const std::unique_ptr<Tensor>& bias, int64_t size, const Tensor& like) {
  return !bias || (bias->is_strided() && bias->ndim() == 1 && bias->size() == size && bias->dtype() == like.dtype() &&
                   bias->device() == like.device());
}

// A gradient's dtype must be like's, fp32, or -1 if the gradient isn't wanted.
inline void require_gradient_dtype(int32_t torch_dtype, const Tensor& like, const char* op) {
  require(torch_dtype == -1 || torch_dtype == like.dtype() || torch_dtype == aoti_torch_dtype_float32(), op,
          "a gradient's dtype");
}

inline Tensor new_matrix(const Tensor& like, int64_t rows, int64_t columns, bool wanted = true) {
  const int64_t sizes[] = {wanted ? rows : 0, columns};
  return like.new_empty(wanted ? 2 : 1, sizes, like.dtype());
}

inline std::optional<Matrix> as_matrix(const std::unique_ptr<Tensor>& tensor) {
  return tensor ? std::optional<Matrix>(*tensor) : std::nullopt;
}

inline Tensor new_dbias(const Tensor& dy, int64_t columns, int32_t bias_dtype) {
  const int64_t size = bias_dtype == -1 ? 0 : columns;
  return dy.new_empty(1, &size, bias_dtype == -1 ? dy.dtype() : bias_dtype);
}

struct LinearActArguments {
  static constexpr const char* kOp = "linear_act";

  explicit LinearActArguments(const StableIValue* stack)
      : x(stack[0]),
        weight(stack[1]),
        bias(take_optional(stack[2])),
        activation(take_activation(stack[3])),
        save(take_number<bool>(stack[4])) {
    require(find_dtype(x.dtype(), &dtype) && dtype != Dtype::f64, kOp, "x is none of fp16, bf16, fp32");
    require(is_matrix(x, -1, -1, x), kOp, "x is not a matrix");
    require(is_matrix(weight, -1, x.sizes()[1], x), kOp, "weight does not fit x");
    require(is_bias(bias, outputs(), x), kOp, "bias does not fit weight");
  }
  int64_t rows() const { return x.sizes()[0]; }
  int64_t outputs() const { return weight.sizes()[0]; }
  bool saves_z() const { return save && saves(activation) == Saves::z; }
  Tensor new_output(bool wanted = true) const { return new_matrix(x, rows(), outputs(), wanted); }

  Tensor x, weight;
  std::unique_ptr<Tensor> bias;
  Activation activation;
  bool save;
  Dtype dtype;
};

struct LinearActBackwardArguments {
  static constexpr const char* kOp = "linear_act_backward";

  explicit LinearActBackwardArguments(const StableIValue* stack)
      : dy(stack[0]),
        x(take_optional(stack[1])),
        weight(take_optional(stack[2])),
        saved(stack[3]),
        activation(take_activation(stack[4])),
        weight_dtype(take_optional_dtype(stack[5])),
        bias_dtype(take_optional_dtype(stack[6])),
        by_columns(take_number<bool>(stack[7])) {
    require(find_dtype(dy.dtype(), &dtype) && dtype != Dtype::f64, kOp, "dy is none of fp16, bf16, fp32");
    require(is_matrix(dy, -1, -1, dy), kOp, "dy is not a matrix");
    require(!x || is_matrix(*x, rows(), -1, dy), kOp, "x does not fit dy");
    require(!weight || is_matrix(*weight, outputs(), -1, dy), kOp, "weight does not fit dy");
    require(saves(activation) == Saves::nothing || is_matrix(saved, rows(), outputs(), dy), kOp,
            "saved does not fit dy");
    require(weight_dtype == -1 || x, kOp, "x is missing");
    require_gradient_dtype(weight_dtype, dy, kOp);
    require_gradient_dtype(bias_dtype, dy, kOp);
  }
  int64_t rows() const { return dy.sizes()[0]; }
  int64_t outputs() const { return dy.sizes()[1]; }
  bool wants_dx() const { return weight != nullptr; }
  bool wants_dweight() const { return weight_dtype != -1; }
  bool wants_dbias() const { return bias_dtype != -1; }
  Tensor new_dx() const { return new_matrix(dy, rows(), wants_dx() ? weight->sizes()[1] : 0, wants_dx()); }
  Tensor new_dweight() const {
    if (!wants_dweight()) return new_matrix(dy, 0, 0, /*wanted=*/false);
    const int64_t sizes[] = {outputs(), x->sizes()[1]}, strides[] = {1, outputs()};
    return by_columns ? dy.new_empty(2, sizes, strides, weight_dtype) : dy.new_empty(2, sizes, weight_dtype);
  }

  Tensor dy;
  std::unique_ptr<Tensor> x, weight;
  Tensor saved;
  Activation activation;
  int32_t weight_dtype, bias_dtype;  // torch's numbers; -1: not wanted
  bool by_columns;                   // dweight's columns lie one after another, as the weight's do
  Dtype dtype;
};

}  // namespace mpk
