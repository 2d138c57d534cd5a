// The part of cuBLAS that is used here, declared by hand, of the library that torch brings into the process. It is
// found at run time: so the build needs no cuBLAS, and one library serves every CUDA that torch comes with.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include "common/tensor.h"

namespace mpk {

// Of the 64-bit interface, there since CUDA 12; the values are those of cublas_api.h and library_types.h.
namespace cublas {

using Handle = struct Context*;
using Status = int;
enum Operation : int { kPlain = 0, kTransposed = 1 };
enum Type : int { kFp32 = 0, kFp16 = 2, kBf16 = 14 };
inline constexpr int kComputeInFp32 = 68;
inline constexpr int kComputeInTf32 = 77;  // of fp32 operands alone; sums are in fp32
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

}  // namespace cublas
}  // namespace mpk
