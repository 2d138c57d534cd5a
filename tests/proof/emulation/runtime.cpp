#include "runtime.h"

#include <cstdio>
#include <cstring>
#include <mutex>

#include "common/torch_abi.h"

#define EMULATION_TESTS_USE extern "C" __attribute__((visibility("default")))

// Tests set it: at 1 the next call that gives a stream work will fail, at 2 the one after it.
EMULATION_TESTS_USE int emulation_calls_to_failure = 0;

EMULATION_TESTS_USE int emulation_launches = 0;
EMULATION_TESTS_USE int emulation_blocks = 0;  // of the last launch

// Memsets that streams were given, and tensors that were allocated.
EMULATION_TESTS_USE int emulation_memsets = 0;
EMULATION_TESTS_USE int emulation_allocations = 0;

// Tests set it: the stream that torch calls the current one. Work for another stream is refused.
EMULATION_TESTS_USE int emulation_stream = 0;

// CUDA's current device. The tensors, which are torch's CPU tensors, count as lying on another device, as on the second
// of two GPUs.
EMULATION_TESTS_USE int emulation_device = 0;
static constexpr int kTensorsDevice = -1;

extern "C" AOTITorchError __real_aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t,
                                                          int32_t, AtenTensorHandle*);
extern "C" AOTITorchError __wrap_aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                                          int32_t dtype, int32_t device_type, int32_t device_index,
                                                          AtenTensorHandle* empty) {
  ++emulation_allocations;
  return __real_aoti_torch_empty_strided(ndim, sizes, strides, dtype, device_type, device_index, empty);
}

cudaError_t emulation::enqueue(cudaStream_t, const std::function<cudaError_t()>& work) { return work(); }

bool emulation::fails_on_demand() { return emulation_calls_to_failure > 0 && --emulation_calls_to_failure == 0; }

// Work must be for the device that has the tensors, and for its current stream: nothing orders other streams after it.
static cudaError_t check_place(cudaStream_t stream) {
  if (emulation::fails_on_demand()) return cudaErrorMemoryAllocation;
  if (emulation_device != kTensorsDevice) return cudaErrorInvalidDevice;
  return reinterpret_cast<intptr_t>(stream) == emulation_stream ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

// ---- errors

static const char* last_failure = "";  // never freed: CUDA's callers keep the pointer

namespace {

struct Description {
  const char *name, *text;
};

Description describe(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return {"cudaSuccess", "no error"};
    case cudaErrorInvalidValue:
      return {"cudaErrorInvalidValue", "invalid argument"};
    case cudaErrorMemoryAllocation:
      return {"cudaErrorMemoryAllocation", "out of memory"};
    case cudaErrorInvalidConfiguration:
      return {"cudaErrorInvalidConfiguration", "invalid configuration argument"};
    case cudaErrorInvalidDevice:
      return {"cudaErrorInvalidDevice", "invalid device ordinal"};
    case cudaErrorInvalidResourceHandle:
      return {"cudaErrorInvalidResourceHandle", "invalid resource handle: the work is not given to the current stream"};
    case cudaErrorLaunchFailure:
      return {"cudaErrorLaunchFailure", last_failure};
    default:
      return {"unrecognized error code", "unrecognized error code"};
  }
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) { return describe(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return describe(error).text; }

// ---- launches

cudaError_t emulation::launch(const cudaLaunchConfig_t* config, const std::function<void()>& thread) {
  static std::mutex one_launch;
  if (!config) return cudaErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(one_launch);
  if (const cudaError_t error = check_place(config->stream)) return error;
  if (!is_launchable(*config)) return cudaErrorInvalidConfiguration;
  ++emulation_launches;
  emulation_blocks = config->gridDim.x;
  const std::string failure = run_grid(config->gridDim, config->blockDim, thread);
  if (failure.empty()) return cudaSuccess;
  last_failure = strdup(("unspecified launch failure: " + failure).c_str());
  fprintf(stderr, "emulated CUDA: %s\n", last_failure);
  return cudaErrorLaunchFailure;
}

// ---- devices, streams and memory

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = emulation_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device != 0 && device != kTensorsDevice) return cudaErrorInvalidDevice;
  emulation_device = device;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(static_cast<intptr_t>(emulation_stream));
  return device == kTensorsDevice ? 0 : 1;
}

cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  if (const cudaError_t error = check_place(stream)) return error;
  ++emulation_memsets;
  memset(to, byte, bytes);
  return cudaSuccess;
}
