#pragma once

#include <functional>

#include "cuda_runtime.h"

extern "C" int emulation_launches;  // of kernels, products among them

namespace emulation {

// Counts a call that gives a stream work; true where a test wants it to fail.
bool fails_on_demand();

// What a call leaves to the stream: done at once, or, on the stand-in for a GPU, when the stream comes to it.
cudaError_t enqueue(cudaStream_t stream, const std::function<cudaError_t()>& work);

// What CUDA refuses of a launch, whatever the kernel. Ours have one dimension.
inline bool is_launchable(const cudaLaunchConfig_t& config) {
  const auto is_line = [](const dim3& size, unsigned most) {
    return size.x > 0 && size.x <= most && size.y == 1 && size.z == 1;
  };
  return is_line(config.gridDim, 0x7fffffff) && is_line(config.blockDim, 1024);
}

}  // namespace emulation
