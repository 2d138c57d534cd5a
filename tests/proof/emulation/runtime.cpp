#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "common/torch_abi.h"

using emulation::kSharedBytes, emulation::kSharedBytesOptIn, emulation::remember;

namespace {

std::mutex one_launch;          // guards what follows, too
const char* last_failure = "";  // never freed: CUDA's callers keep the pointer

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

// Tests set it: at 1 the next call that gives a stream work will fail, at 2 the one after it.
extern "C" __attribute__((visibility("default"))) int emulation_calls_to_failure = 0;

extern "C" __attribute__((visibility("default"))) int emulation_launches = 0;
extern "C" __attribute__((visibility("default"))) int emulation_blocks = 0;  // of the last launch

// Copies and memsets that streams were given, and tensors that were allocated.
extern "C" __attribute__((visibility("default"))) int emulation_copies = 0;
extern "C" __attribute__((visibility("default"))) int emulation_memsets = 0;
extern "C" __attribute__((visibility("default"))) int emulation_allocations = 0;

// Tests set it: which of its streams torch says is the current one. Work for another one is refused.
extern "C" __attribute__((visibility("default"))) int emulation_stream = 0;

// The current one. The tensors are torch's CPU tensors: on another, as on the second of two GPUs.
extern "C" __attribute__((visibility("default"))) int emulation_device = 0;
static constexpr int kTensorsDevice = -1;

// If it is set, it is told of each launch, and says whether to do it: tests/proof/gate runs the chip's own code
// instead.
extern "C" __attribute__((visibility("default"))) int (*emulation_watcher)(const void* kernel, const char* parameters,
                                                                           size_t bytes, unsigned grid, unsigned block,
                                                                           size_t shared) = nullptr;

extern "C" AOTITorchError __real_aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t,
                                                          int32_t, AtenTensorHandle*);
extern "C" AOTITorchError __wrap_aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                                          int32_t dtype, int32_t device_type, int32_t device_index,
                                                          AtenTensorHandle* empty) {
  ++emulation_allocations;
  return __real_aoti_torch_empty_strided(ndim, sizes, strides, dtype, device_type, device_index, empty);
}

cudaError_t emulation::remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t emulation::enqueue(cudaStream_t, const std::function<cudaError_t()>& work) { return work(); }

bool emulation::fails_on_demand() { return emulation_calls_to_failure > 0 && --emulation_calls_to_failure == 0; }

// Work is given to the device that has the tensors, and to its current stream: nothing orders another one after it.
static cudaError_t check_place(cudaStream_t stream) {
  if (emulation::fails_on_demand()) return cudaErrorMemoryAllocation;
  if (emulation_device != kTensorsDevice) return cudaErrorInvalidDevice;
  return reinterpret_cast<intptr_t>(stream) == emulation_stream ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t emulation::launch(const cudaLaunchConfig_t* config, const void* kernel, const std::string& parameters,
                              const std::function<void()>& thread) {
  if (!config || !kernel) return remember(cudaErrorInvalidValue);
  const std::lock_guard<std::mutex> lock(one_launch);
  if (const cudaError_t error = check_place(config->stream)) return remember(error);
  if (const cudaError_t error = check_launch(*config, kernel)) return remember(error);
  ++emulation_launches;
  emulation_blocks = config->gridDim.x;
  if (emulation_watcher && !emulation_watcher(kernel, parameters.data(), parameters.size(), config->gridDim.x,
                                              config->blockDim.x, config->dynamicSmemBytes)) {
    return cudaSuccess;
  }
  return enqueue(config->stream, [config = *config, thread] {
    const std::string failure = run_grid(config.gridDim, config.blockDim, config.dynamicSmemBytes, thread);
    if (failure.empty()) return cudaSuccess;
    last_failure = strdup(("unspecified launch failure: " + failure).c_str());
    fprintf(stderr, "emulated CUDA: %s\n", last_failure);
    return remember(cudaErrorLaunchFailure);
  });
}

// ---- errors

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle: the work is not given to the current stream";
    case cudaErrorLaunchFailure:
      return last_failure;
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
  }
  return "unrecognized error code";
}

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

// ---- devices and streams

// Tests set them: the compute capability is 10 times the major one and the minor one. Not a power of two of
// multiprocessors, as on many GPUs.
extern "C" __attribute__((visibility("default"))) int emulation_compute_capability = 90;
extern "C" __attribute__((visibility("default"))) int emulation_multiprocessors = 3;
extern "C" __attribute__((visibility("default"))) int emulation_l2_bytes = 1 << 20;

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const std::map<cudaDeviceAttr, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxSharedMemoryPerBlock, kSharedBytes},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMultiProcessorCount, emulation_multiprocessors},
      {cudaDevAttrL2CacheSize, emulation_l2_bytes},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrComputeCapabilityMajor, emulation_compute_capability / 10},
      {cudaDevAttrComputeCapabilityMinor, emulation_compute_capability % 10},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedBytesOptIn},
  };
  if (device != 0 && device != kTensorsDevice) return remember(cudaErrorInvalidDevice);
  const auto found = values.find(attribute);
  if (!value || found == values.end()) return remember(cudaErrorInvalidValue);
  *value = found->second;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = emulation_device, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device != 0 && device != kTensorsDevice) return remember(cudaErrorInvalidDevice);
  emulation_device = device;
  return cudaSuccess;
}
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(static_cast<intptr_t>(emulation_stream));
  return device == kTensorsDevice ? 0 : 1;
}

// ---- memory

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (const cudaError_t error = check_place(stream)) return remember(error);
  ++emulation_copies;
  return emulation::enqueue(stream, [=] { return memcpy(to, from, bytes), cudaSuccess; });
}
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  if (const cudaError_t error = check_place(stream)) return remember(error);
  ++emulation_memsets;
  return emulation::enqueue(stream, [=] { return memset(to, byte, bytes), cudaSuccess; });
}
cudaError_t cudaMalloc(void** address, size_t bytes) {
  constexpr size_t kAlignment = 256;
  *address = aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  return *address || bytes == 0 ? cudaSuccess : remember(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* address) {
  free(address);
  return cudaSuccess;
}
