#pragma once

#include <functional>

#include "cuda_runtime.h"

extern "C" int emulation_launches;  // of kernels, products among them

namespace emulation {

// Counts a call that gives a stream work; true where a test wants it to fail.
bool fails_on_demand();

// What a call leaves to the stream: done at once, or, on the stand-in for a GPU, when the stream comes to it.
cudaError_t enqueue(cudaStream_t stream, const std::function<cudaError_t()>& work);

// Returns the error, which cudaGetLastError will give out as well.
cudaError_t remember(cudaError_t error);

// What CUDA refuses of a launch, whatever the kernel.
cudaError_t check_launch(const cudaLaunchConfig_t& config, const void* kernel);
constexpr size_t kSharedBytes = 48 << 10, kSharedBytesOptIn = 227 << 10;  // compute capability 9.0

}  // namespace emulation
