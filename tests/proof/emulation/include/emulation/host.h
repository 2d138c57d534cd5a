// The part of the runtime's host interface that launchers use. A call has finished on return (runtime.cpp), or becomes
// work of a stream of the stand-in (on_streams.cpp).
#pragma once

#include <tuple>
#include <utility>

#include "scheduler.h"

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorLaunchFailure = 719,
};
using cudaError_t = cudaError;  // as CUDA has it: a template's symbol names its result

extern "C" {  // as in CUDA: in tests/proof/standin, a library has them

// The text of cudaErrorLaunchFailure goes on to say what the kernel did wrong.
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);

// ---- devices: one

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);

// ---- streams and memory

typedef struct CUstream_st* cudaStream_t;

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);

cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream = nullptr);

}  // extern "C"

// ---- launches

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

namespace emulation {

cudaError_t launch(const cudaLaunchConfig_t* config, const std::function<void()>& thread);

template <class Parameter>
constexpr size_t aligned_for(size_t bytes) {
  return (bytes + alignof(Parameter) - 1) / alignof(Parameter) * alignof(Parameter);
}

template <class... Parameters>
constexpr size_t parameter_bytes() {
  size_t bytes = 0;
  ((bytes = aligned_for<Parameters>(bytes) + sizeof(Parameters)), ...);
  return bytes;
}

}  // namespace emulation

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert(emulation::parameter_bytes<std::decay_t<Parameters>...>() <= 32764,
                "a kernel takes at most 32764 bytes");
  const std::tuple<std::decay_t<Parameters>...> parameters(std::forward<Arguments>(arguments)...);
  return emulation::launch(config, [=] { std::apply(kernel, parameters); });
}
