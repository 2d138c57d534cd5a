// The device and the stream of a launch: the tensor's, and torch's current one there. Raises CUDA's errors.
#pragma once

#ifdef MPK_CUDA
#include <cuda_runtime.h>

#include "common/tensor.h"

namespace mpk {

inline void require_success(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  require(false, op, std::string("CUDA says ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Makes a tensor's device the current one while this object lives, and holds torch's current stream there.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor) {
    const int device = tensor.device().second;
    require_success(cudaGetDevice(&previous_), "mpkernels");
    is_elsewhere_ = previous_ != device;
    if (is_elsewhere_) require_success(cudaSetDevice(device), "mpkernels");
    require(aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(device, &stream_) == 0,
            "mpkernels", "torch has no current CUDA stream");
  }
  OnDeviceOf(const OnDeviceOf&) = delete;
  ~OnDeviceOf() {
    if (is_elsewhere_) (void)cudaSetDevice(previous_);  // a destructor can't raise; CUDA's next call will
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

 private:
  int previous_ = 0;
  bool is_elsewhere_ = false;
  void* stream_ = nullptr;
};

// Whether the stream records its work into a CUDA graph instead of running it.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  require_success(cudaStreamIsCapturing(stream, &status), "mpkernels");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace mpk
#endif
