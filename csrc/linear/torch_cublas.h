// Matrix products by cuBLAS.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "common/torch.h"
#include "linear/cublas_abi.h"
#include "linear/matrix.h"

namespace mpk {

namespace cublas {

// cuBLAS reads a matrix whose rows, or whose columns, lie one after another, gaps between them allowed.
inline bool has_rows_in_line(const Matrix& it) {
  return (it.columns <= 1 || it.column_stride == 1) &&
         (it.rows <= 1 || it.row_stride >= std::max<int64_t>(it.columns, 1));
}
inline bool is_readable(const Matrix& it) { return has_rows_in_line(it) || has_rows_in_line(it.transposed()); }
// It counts by columns: rows in line are the columns of the transpose.
inline Operation operation(const Matrix& it) { return has_rows_in_line(it) ? kPlain : kTransposed; }
inline int64_t leading_dimension(const Matrix& it) {
  if (!has_rows_in_line(it)) return leading_dimension(it.transposed());
  return it.rows > 1 ? it.row_stride : std::max<int64_t>(it.columns, 1);
}
inline Type type_of(Dtype dtype) { return dtype == Dtype::f16 ? kFp16 : dtype == Dtype::b16 ? kBf16 : kFp32; }

// What NVIDIA recommends for Hopper. It is torch's memory, which CUDA graphs may hold: cuBLAS would allocate some of
// its own, once for each capture.
inline constexpr int64_t kWorkspace = int64_t{32} << 20;

// What a handle allocates is no part of a graph that is being captured.
template <class Handle>
Handle create_handle(const char* op, Status (*create)(Handle*), const char* function) {
  Handle handle = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  mpk::require_success(cudaThreadExchangeStreamCaptureMode(&mode), op);
  const Status status = create(&handle);
  mpk::require_success(cudaThreadExchangeStreamCaptureMode(&mode), op);
  require_success(status, op, function);
  return handle;
}

}  // namespace cublas

// As torch is set; in Python, for its C ABI does not tell.
inline bool uses_tf32(const char* op) {
  StableIValue answer = 0;
  require(torch_call_dispatcher("mpkernels::uses_tf32", "", &answer, kTorch2_10) == 0, op,
          "torch could not say whether TF32 is allowed");
  return static_cast<bool>(answer & 0xff);
}

// A contiguous matrix that owns its memory, on the device of another tensor.
struct OwnMatrix {
  OwnMatrix(const Tensor& like, int64_t rows, int64_t columns, int32_t torch_dtype)
      : memory(new_empty(like, {rows, columns}, torch_dtype)), view(memory) {}
  static Tensor new_empty(const Tensor& like, const std::array<int64_t, 2>& sizes, int32_t torch_dtype) {
    return like.new_empty(2, sizes.data(), torch_dtype);
  }
  Tensor memory;
  const Matrix view;
};

// A tensor as a matrix that cuBLAS can read: the tensor's own memory, or a copy's.
class Operand {
 public:
  explicit Operand(const Tensor& tensor) : matrix_(tensor) {
    if (cublas::is_readable(matrix_)) return;
    copy_ = std::make_unique<OwnMatrix>(tensor, matrix_.rows, matrix_.columns, tensor.dtype());
    copy_->memory.copy_from(tensor);
    matrix_ = copy_->view;
  }
  const Matrix& matrix() const { return matrix_; }

 private:
  Matrix matrix_;
  std::unique_ptr<OwnMatrix> copy_;
};

// A handle for the time of a call, since only one thread may use it. Handles are kept for the next call and never
// destroyed: at exit, CUDA may be gone before them.
class CublasHandle {
 public:
  CublasHandle(const char* op, int32_t device) : device_(device) {
    if (!take_free_one()) handle_ = cublas::create_handle(op, cublas::functions(op).create, "cublasCreate_v2");
  }
  CublasHandle(const CublasHandle&) = delete;
  ~CublasHandle() {
    const std::lock_guard<std::mutex> lock(stock().mutex);
    stock().of_device[device_].push_back(handle_);
  }
  operator cublas::Handle() const { return handle_; }

 private:
  struct Stock {
    std::mutex mutex;
    std::map<int32_t, std::vector<cublas::Handle>> of_device;
  };
  static Stock& stock() {
    static Stock& it = *new Stock;
    return it;
  }
  bool take_free_one() {
    const std::lock_guard<std::mutex> lock(stock().mutex);
    auto& free = stock().of_device[device_];
    if (free.empty()) return false;
    handle_ = free.back();
    free.pop_back();
    return true;
  }

  int32_t device_;
  cublas::Handle handle_ = nullptr;
};

// cuBLAS on a stream of the current device.
class Cublas {
 public:
  Cublas(const char* op, const Tensor& on_device_of, cudaStream_t stream)
      : op_(op),
        functions_(cublas::functions(op)),
        stream_(stream),
        workspace_(on_device_of.scratch(cublas::kWorkspace)),
        handle_(op, on_device_of.device().second) {
    check(functions_.set_math_mode(handle_, cublas::kReduceInFp32), "cublasSetMathMode");
    check(functions_.set_stream(handle_, stream), "cublasSetStream_v2");  // which takes the workspace away
    check(functions_.set_workspace(handle_, workspace_.data(), cublas::kWorkspace), "cublasSetWorkspace_v2");
  }

  // out = a b, summed in fp32 and rounded once; out is contiguous. fp32 operands are rounded to TF32 where torch's are.
  void multiply(const Matrix& out, const Matrix& a, const Matrix& b) const {
    if (out.rows == 0 || out.columns == 0) return;
    if (a.columns == 0) {
      const size_t bytes = out.rows * out.columns * width_of(out.dtype);
      mpk::require_success(cudaMemsetAsync(out.data, 0, bytes, stream_), op_);
      return;
    }
    using namespace cublas;
    const float one = 1, zero = 0;
    // out^T = b^T a^T
    check(functions_.gemm(handle_, operation(b), operation(a), out.columns, out.rows, a.columns, &one, b.data,
                          type_of(b.dtype), leading_dimension(b), a.data, type_of(a.dtype), leading_dimension(a), &zero,
                          out.data, type_of(out.dtype), leading_dimension(out), compute_type(a), kDefaultAlgorithm),
          "cublasGemmEx_64");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  int compute_type(const Matrix& operand) const {
    return operand.dtype == Dtype::f32 && uses_tf32(op_) ? cublas::kComputeInTf32 : cublas::kComputeInFp32;
  }
  void check(cublas::Status status, const char* function) const { cublas::require_success(status, op_, function); }

  const char* op_;
  const cublas::Functions& functions_;
  cudaStream_t stream_;
  Tensor workspace_;
  CublasHandle handle_;
};

}  // namespace mpk
