// Matrix products by the cuBLAS that torch brings into the process. It is found at run time, and its few functions are
// declared by hand: so the build needs no cuBLAS, and one library serves every CUDA that torch comes with.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "torch_matrix.h"

namespace mpk {

// Of the 64-bit interface, there since CUDA 12; the values are those of cublas_api.h and library_types.h.
namespace cublas {

using Handle = struct Context*;
using Status = int;
enum Operation : int { kPlain = 0, kTransposed = 1 };
enum Type : int { kFp32 = 0, kFp16 = 2, kBf16 = 14 };
inline constexpr int kComputeInFp32 = 68;  // fp32 operands too, whatever torch's allow_tf32 says
inline constexpr int kDefaultAlgorithm = -1;
inline constexpr int kReduceInFp32 = 16;  // else partial sums of a product may meet in 16 bits

struct Functions {
  Status (*create)(Handle*);
  Status (*set_math_mode)(Handle, int mode);
  Status (*set_stream)(Handle, cudaStream_t);
  Status (*set_workspace)(Handle, void* memory, size_t bytes);
  Status (*gemm)(Handle, Operation, Operation, int64_t m, int64_t n, int64_t k, const void* alpha, const void* a, Type,
                 int64_t lda, const void* b, Type, int64_t ldb, const void* beta, void* c, Type, int64_t ldc,
                 int compute, int algorithm);
  const char* (*status_name)(Status);
};

// The one that torch is linked with, or another that the process has loaded.
inline void* find_library() {
  for (const char* name : {"libtorch_cuda.so", "libcublas.so.13", "libcublas.so.12"}) {
    void* const library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (library && dlsym(library, "cublasGemmEx_64")) return library;  // looks into what library depends on, too
  }
  return nullptr;
}

// Throws where there is none, each time that it is called.
inline const Functions& functions(const char* op) {
  static const Functions found = [op] {
    void* const library = find_library();
    require(library, op,
            "this process has no cuBLAS of CUDA 12 or later, which a torch with CUDA brings. Without it, "
            "mpkernels.backend(\"triton\") and mpkernels.backend(\"reference\") work");
    Functions it{};
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      require(function, op, std::string("the process's cuBLAS has no ") + name);
    };
    find(it.create, "cublasCreate_v2");
    find(it.set_math_mode, "cublasSetMathMode");
    find(it.set_stream, "cublasSetStream_v2");
    find(it.set_workspace, "cublasSetWorkspace_v2");
    find(it.gemm, "cublasGemmEx_64");
    find(it.status_name, "cublasGetStatusName");
    return it;
  }();
  return found;
}

inline void require_success(Status status, const char* op, const char* function) {
  if (status == 0) return;
  require(false, op, std::string("cuBLAS says ") + functions(op).status_name(status) + " in " + function);
}

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

}  // namespace cublas

// A tensor as a matrix that cuBLAS can read: the tensor's own memory, or a copy's.
class Operand {
 public:
  explicit Operand(const Tensor& tensor) : matrix_(tensor) {
    if (cublas::is_readable(matrix_)) return;
    copy_ = std::make_unique<Tensor>(tensor.new_empty(2, tensor.sizes(), tensor.dtype()));
    copy_->copy_from(tensor);
    matrix_ = Matrix(*copy_);
  }
  const Matrix& matrix() const { return matrix_; }

 private:
  Matrix matrix_;
  std::unique_ptr<Tensor> copy_;
};

// A handle for the time of a call, since only one thread may use it. Handles are kept for the next call and never
// destroyed: at exit, CUDA may be gone before them.
class CublasHandle {
 public:
  CublasHandle(const char* op, int32_t device) : device_(device) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      auto& free = free_handles()[device];
      if (!free.empty()) {
        handle_ = free.back();
        free.pop_back();
        return;
      }
    }
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // what a handle allocates is no part of a graph
    require_success(cudaThreadExchangeStreamCaptureMode(&mode), op);
    const cublas::Status status = cublas::functions(op).create(&handle_);
    require_success(cudaThreadExchangeStreamCaptureMode(&mode), op);
    cublas::require_success(status, op, "cublasCreate_v2");
  }
  CublasHandle(const CublasHandle&) = delete;
  ~CublasHandle() {
    const std::lock_guard<std::mutex> lock(mutex());
    free_handles()[device_].push_back(handle_);
  }
  operator cublas::Handle() const { return handle_; }

 private:
  static std::mutex& mutex() {
    static auto& it = *new std::mutex;
    return it;
  }
  static std::map<int32_t, std::vector<cublas::Handle>>& free_handles() {
    static auto& it = *new std::map<int32_t, std::vector<cublas::Handle>>;
    return it;
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
        workspace_(on_device_of.scratch(kWorkspace)),
        handle_(op, on_device_of.device().second) {
    check(functions_.set_math_mode(handle_, cublas::kReduceInFp32), "cublasSetMathMode");
    check(functions_.set_stream(handle_, stream), "cublasSetStream_v2");  // which takes the workspace away
    check(functions_.set_workspace(handle_, workspace_.data(), kWorkspace), "cublasSetWorkspace_v2");
  }

  // out = a b, summed in fp32 and rounded once; out is contiguous.
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
                          out.data, type_of(out.dtype), leading_dimension(out), kComputeInFp32, kDefaultAlgorithm),
          "cublasGemmEx_64");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  // What NVIDIA recommends for Hopper. It is torch's memory, which CUDA graphs may hold: cuBLAS would allocate some of
  // its own, once for each capture.
  static constexpr int64_t kWorkspace = int64_t{32} << 20;

  void check(cublas::Status status, const char* function) const { cublas::require_success(status, op_, function); }

  const char* op_;
  const cublas::Functions& functions_;
  cudaStream_t stream_;
  Tensor workspace_;
  CublasHandle handle_;
};

}  // namespace mpk
