// cuBLAS on the CPU: what csrc/linear/cublas_abi.h finds when it looks for the library. It takes its arguments as
// seriously as the real one does, and computes in fp32.
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "blas.h"
#include "runtime.h"

// Tests set it to 0: then no library brings it.
extern "C" __attribute__((visibility("default"))) int emulation_has_cublas = 1;

using namespace emulation;

namespace {

enum { fp32_reduction = 16 };

struct Context {
  int math_mode = 0;
  bool has_stream = false;
  cudaStream_t stream = nullptr;
  char* workspace = nullptr;  // forgotten when a stream is set
  size_t workspace_bytes = 0;
};

const char* status_name(int status) {
  switch (status) {
    case success:
      return "CUBLAS_STATUS_SUCCESS";
    case not_initialized:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case alloc_failed:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case invalid_value:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case arch_mismatch:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case execution_failed:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case internal_error:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case not_supported:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unrecognized status";
}

int create(Context** handle) {
  if (emulation::fails_on_demand() || !may_allocate()) return alloc_failed;
  *handle = new Context;
  return success;
}

int set_math_mode(Context* handle, int mode) {
  if (emulation::fails_on_demand()) return internal_error;
  handle->math_mode = mode;
  return success;
}

int set_stream(Context* handle, cudaStream_t stream) {
  if (emulation::fails_on_demand()) return internal_error;
  if (!emulation::is_current(stream)) return invalid_value;
  handle->has_stream = true;
  handle->stream = stream;
  handle->workspace = nullptr;
  return success;
}

int set_workspace(Context* handle, void* memory, size_t bytes) {
  if (emulation::fails_on_demand()) return internal_error;
  handle->workspace = static_cast<char*>(memory);
  handle->workspace_bytes = bytes;
  return success;
}

// Column by column: c[m, n] = alpha op(a)[m, k] op(b)[k, n] + beta c.
int gemm(Context* handle, int op_a, int op_b, int64_t m, int64_t n, int64_t k, const float* alpha, const void* a,
         int a_type, int64_t lda, const void* b, int b_type, int64_t ldb, const float* beta, void* c, int c_type,
         int64_t ldc, int compute, int algorithm) {
  if (emulation::fails_on_demand()) return execution_failed;
  if (!handle) return not_initialized;
  // The real one would get its workspace elsewhere, and might add in 16 bits: neither is wanted here.
  if (!handle->has_stream || !handle->workspace || handle->math_mode != fp32_reduction) return internal_error;
  mpk::Dtype a_dtype, b_dtype, c_dtype;
  if (!find_dtype(a_type, &a_dtype) || !find_dtype(b_type, &b_dtype) || !find_dtype(c_type, &c_dtype) ||
      a_type != b_type || (c_type != a_type && c_dtype != mpk::Dtype::f32) ||
      (compute != compute_in_fp32 && (compute != compute_in_tf32 || a_dtype != mpk::Dtype::f32)) || algorithm != -1) {
    return not_supported;
  }
  const auto valid = [](int op, int64_t ld, int64_t rows, int64_t columns) {
    return (op == 0 || op == 1) && ld >= std::max<int64_t>(1, op == 0 ? rows : columns);
  };
  if (m < 0 || n < 0 || k < 0 || !alpha || !beta || !valid(op_a, lda, m, k) || !valid(op_b, ldb, k, n) ||
      ldc < std::max<int64_t>(1, m)) {
    return invalid_value;
  }
  ++emulation_launches;
  return status_of(emulation::enqueue(handle->stream, [=, by = *alpha, keep = *beta, context = *handle] {
    context.workspace[0] = context.workspace[context.workspace_bytes - 1] = 0;
    auto wide_a = widened(a, a_dtype, m, k, op_a == 0 ? 1 : lda, op_a == 0 ? lda : 1);
    auto wide_b = widened(b, b_dtype, n, k, op_b == 0 ? ldb : 1, op_b == 0 ? 1 : ldb);
    if (compute == compute_in_tf32) {
      round_to_tf32(&wide_a);
      round_to_tf32(&wide_b);
    }
    mpk::with_dtype(c_dtype, [&](auto zero) {
      auto* const to = static_cast<decltype(zero)*>(c);
      for (int64_t column = 0; column < n; ++column) {
        for (int64_t row = 0; row < m; ++row) {
          auto& element = to[column * ldc + row];
          mpk::Compute<decltype(zero)> sum = by * dot(&wide_a[row * k], &wide_b[column * k], k);
          if (keep != 0) sum += keep * mpk::widen(element);
          mpk::narrow(sum, element);
        }
      }
    });
    return cudaSuccess;
  }));
}

const struct {
  const char* name;
  void* function;
} functions[] = {
    {"cublasCreate_v2", reinterpret_cast<void*>(create)},
    {"cublasSetMathMode", reinterpret_cast<void*>(set_math_mode)},
    {"cublasSetStream_v2", reinterpret_cast<void*>(set_stream)},
    {"cublasSetWorkspace_v2", reinterpret_cast<void*>(set_workspace)},
    {"cublasGemmEx_64", reinterpret_cast<void*>(gemm)},
    {"cublasGetStatusName", reinterpret_cast<void*>(status_name)},
};
int library;

}  // namespace

// Hidden like all else here: only this library's own calls arrive.
void* dlopen(const char* name, int) noexcept {
  return emulation_has_cublas && std::string(name) == "libtorch_cuda.so" ? &library : nullptr;
}
void* dlsym(void*, const char* name) noexcept {
  for (const auto& it : functions) {
    if (!strcmp(it.name, name)) return it.function;
  }
  return find_in_cublaslt(name);
}
