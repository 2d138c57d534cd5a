// torch's products: its CPU ops compute them, but for the one that CUDA alone has, an fp32 product of 16-bit matrices.
#include <memory>

#include "blas.h"
#include "linear/matrix.h"
#include "runtime.h"

extern "C" AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle from, AtenTensorHandle* to);
extern "C" AOTITorchError __real_torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t);

namespace {

using mpk::Tensor;

struct Product {
  std::string op, overload;
  std::vector<Tensor> tensors;  // the last one is the result
  uint64_t version;

  cudaError_t run() const {
    if (overload == "dtype_out") return multiply_to_fp32(), cudaSuccess;
    std::vector<StableIValue> stack;
    for (const Tensor& each : tensors) {
      AtenTensorHandle handle = nullptr;  // which torch takes
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
    const mpk::Matrix a(tensors[0]), b(tensors[1]), out(tensors[2]);
    const auto left = emulation::widened(a.data, a.dtype, a.rows, a.columns, a.row_stride, a.column_stride);
    const auto right = emulation::widened(b.data, b.dtype, b.columns, b.rows, b.column_stride, b.row_stride);
    for (int64_t row = 0; row < out.rows; ++row) {
      for (int64_t column = 0; column < out.columns; ++column) {
        static_cast<float*>(out.data)[row * out.row_stride + column * out.column_stride] =
            emulation::dot(left.data() + row * a.columns, right.data() + column * a.columns, a.columns);
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
