// The products that torch computes for kernels. torch's CPU ops compute them here, except the fp32 product of 16-bit
// matrices, which torch has on CUDA alone: it is computed below.
#include <memory>
#include <vector>

#include "common/cuda.h"
#include "linear/matrix.h"
#include "runtime.h"

extern "C" AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle from, AtenTensorHandle* to);
extern "C" AOTITorchError __real_torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t);

namespace {

using mpk::Matrix, mpk::Tensor;

// Returns the matrix in fp32, one row after another.
std::vector<float> widened(const Matrix& matrix) {
  std::vector<float> wide(matrix.rows * matrix.columns);
  mpk::with_dtype(matrix.dtype, [&](auto zero) {
    const auto* const from = static_cast<const decltype(zero)*>(matrix.data);
    for (int64_t row = 0; row < matrix.rows; ++row) {
      for (int64_t column = 0; column < matrix.columns; ++column) {
        const auto element = from[row * matrix.row_stride + column * matrix.column_stride];
        wide[row * matrix.columns + column] = static_cast<float>(mpk::widen(element));
      }
    }
  });
  return wide;
}

// Sixteen partial sums, as a GPU's threads hold parts of a long one.
float dot(const float* a, const float* b, int64_t size) {
  constexpr int parts = 16;
  float part[parts] = {};
  for (int64_t i = 0; i < size; ++i) part[i % parts] += a[i] * b[i];
  for (int half = parts / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

struct Product {
  std::string op, overload;
  std::vector<Tensor> tensors;  // the last one is the result
  uint64_t version;

  cudaError_t run() const {
    if (overload == "dtype_out") return multiply_to_fp32(), cudaSuccess;
    std::vector<StableIValue> stack;
    for (const Tensor& each : tensors) {
      AtenTensorHandle handle = nullptr;  // torch takes it, and deletes it
      if (aoti_torch_new_tensor_handle(each.handle(), &handle) != 0) return cudaErrorInvalidValue;
      stack.push_back(reinterpret_cast<StableIValue>(handle));
    }
    if (op == "aten::linear") stack[2] = reinterpret_cast<StableIValue>(new StableIValue(stack[2]));
    if (__real_torch_call_dispatcher(op.c_str(), overload.c_str(), stack.data(), version) != 0)
      return cudaErrorInvalidValue;
    Tensor{stack[0]};
    return cudaSuccess;
  }

  void multiply_to_fp32() const {
    const Matrix a(tensors[0]), b(tensors[1]), out(tensors[2]);
    const std::vector<float> left = widened(a), right = widened(b.transposed());
    for (int64_t row = 0; row < out.rows; ++row) {
      for (int64_t column = 0; column < out.columns; ++column) {
        static_cast<float*>(out.data)[row * out.row_stride + column * out.column_stride] =
            dot(left.data() + row * a.columns, right.data() + column * a.columns, a.columns);
      }
    }
  }
};

}  // namespace

extern "C" AOTITorchError __wrap_torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack,
                                                       uint64_t version) {
  Product product{op, overload, {}, version};
  product.tensors.emplace_back(stack[0]);
  product.tensors.emplace_back(stack[1]);
  if (product.op == "aten::linear")
    product.tensors.emplace_back(*std::unique_ptr<StableIValue>(reinterpret_cast<StableIValue*>(stack[2])));
  product.tensors.emplace_back(stack[std::string("out") == overload && product.op == "aten::mm" ? 2 : 3]);
  if (emulation::fails_on_demand()) return 1;
  ++emulation_launches;
  if (product.run() != cudaSuccess) return 1;
  AtenTensorHandle result = nullptr;
  const AOTITorchError error = aoti_torch_new_tensor_handle(product.tensors.back().handle(), &result);
  stack[0] = reinterpret_cast<StableIValue>(result);
  return error;
}
