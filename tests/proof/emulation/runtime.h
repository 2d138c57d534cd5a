#pragma once

#include <functional>

#include "cuda_runtime.h"

extern "C" int emulation_launches;  // counts kernels and products

namespace emulation {

// Counts a call that gives a stream work. Returns whether a test wants it to fail.
bool fails_on_demand();

// Gives a stream work, which is done at once, or, on the stand-in for a GPU, when the stream comes to it.
cudaError_t enqueue(cudaStream_t stream, const std::function<cudaError_t()>& work);

// Whether CUDA accepts the sizes of a launch, whatever the kernel. Ours have one dimension.
inline bool is_launchable(const cudaLaunchConfig_t& config) {
  const auto is_line = [](const dim3& size, unsigned most) {
    return size.x > 0 && size.x <= most && size.y == 1 && size.z == 1;
  };
  return is_line(config.gridDim, 0x7fffffff) && is_line(config.blockDim, 1024);
}

}  // namespace emulation
