// Attaches kernels to the ops that Python has declared.
#pragma once

#include "common/tensor.h"

namespace mpk {

inline constexpr uint64_t kTorch2_10 = uint64_t{2} << 56 | uint64_t{10} << 48;  // the version of the C ABI

// A kernel takes its arguments off the stack, owns them, and puts its results there.
using Kernel = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

struct Registration {
  Registration(const char* library, const char* dispatch_key, const char* op, Kernel kernel) {
    TorchLibraryHandle handle = nullptr;
    const bool is_registered = aoti_torch_library_init_impl(library, dispatch_key, __FILE__, __LINE__, &handle) == 0 &&
                               torch_library_impl(handle, op, kernel, kTorch2_10) == 0;
    require(is_registered, op, "torch has not taken the kernel");
  }
};

// Python declares the schemas (mpkernels/ops). Each macro registers a kernel for an op on one device.
#ifdef MPK_EMULATION
#define MPK_LIBRARY "mpkernels_emulated"
#define MPK_CPU_KERNEL(op, kernel)
#define MPK_CUDA_KERNEL(op, kernel) MPK_REGISTER("CPU", op, kernel)
#else
#ifndef MPK_LIBRARY  // a test's build has another name
#define MPK_LIBRARY "mpkernels"
#endif
#define MPK_CPU_KERNEL(op, kernel) MPK_REGISTER("CPU", op, kernel)
#define MPK_CUDA_KERNEL(op, kernel) MPK_REGISTER("CUDA", op, kernel)
#endif
#define MPK_KERNEL_WITHOUT_TENSORS(op, kernel) MPK_REGISTER("CompositeExplicitAutograd", op, kernel)
#define MPK_REGISTER(dispatch_key, op, kernel) MPK_REGISTER_AS(__COUNTER__, dispatch_key, op, kernel)
#define MPK_REGISTER_AS(number, dispatch_key, op, kernel) MPK_REGISTRATION(number, dispatch_key, op, kernel)
#define MPK_REGISTRATION(number, dispatch_key, op, kernel) \
  static const mpk::Registration registration_##number{MPK_LIBRARY, dispatch_key, op, &kernel};

}  // namespace mpk
