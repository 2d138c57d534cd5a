#pragma once

#include <functional>

#include "cuda_runtime.h"

extern "C" int emulation_launches;  // of kernels, products among them

namespace emulation {

// Counts a call that gives a stream work, or that a library may refuse; true where a test wants it to fail.
bool fails_on_demand();

// Whether torch says that this is the current stream.
bool is_current(cudaStream_t stream);

// What a call leaves to the stream: done at once, or at each replay where the stream is being captured.
cudaError_t enqueue(const std::function<cudaError_t()>& work);

}  // namespace emulation
