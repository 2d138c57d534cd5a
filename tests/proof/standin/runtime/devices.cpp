// Devices and their properties. Devices differ in their capability alone.
#include <cstdio>
#include <cstring>

#include "machine.h"

using namespace standin;

namespace {

constexpr int kMultiprocessors = 132;
constexpr size_t kShared = 48 << 10, kSharedOptIn = 227 << 10, kL2 = 50 << 20;

bool is_device(int device) { return device >= 0 && device < settings().devices; }
int capability_of(int device) {
  const std::vector<int>& all = settings().capabilities;
  return all[std::min<size_t>(device, all.size() - 1)];
}

}  // namespace

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (settings().driver / 1000 < CUDART_VERSION / 1000) return fail(cudaErrorInsufficientDriver);
  if (settings().devices == 0) return fail(cudaErrorNoDevice);
  *count = settings().devices;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return outcome();
}
API cudaError_t cudaDriverGetVersion(int* version) { return *version = settings().driver, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* it, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  *it = {};
  strcpy(it->name, "NVIDIA H100 80GB HBM3 that is not there");
  memset(&it->uuid, 0x40 + device, sizeof it->uuid);
  it->totalGlobalMem = settings().memory;
  it->major = capability_of(device) / 10, it->minor = capability_of(device) % 10;
  it->multiProcessorCount = kMultiprocessors;
  it->warpSize = 32;
  it->maxThreadsPerBlock = it->maxThreadsDim[0] = it->maxThreadsDim[1] = 1024;
  it->maxThreadsDim[2] = 64;
  it->maxGridSize[0] = 0x7fffffff, it->maxGridSize[1] = it->maxGridSize[2] = 65535;
  it->maxThreadsPerMultiProcessor = 2048;
  it->sharedMemPerBlock = kShared, it->sharedMemPerBlockOptin = kSharedOptIn;
  it->sharedMemPerMultiprocessor = 228 << 10;
  it->regsPerBlock = it->regsPerMultiprocessor = 65536;
  it->l2CacheSize = kL2;
  it->pciBusID = 1 + device;
  it->unifiedAddressing = it->canMapHostMemory = it->concurrentKernels = it->memoryPoolsSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  const std::map<cudaDeviceAttr, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxSharedMemoryPerBlock, kShared},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedOptIn},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMultiProcessorCount, kMultiprocessors},
      {cudaDevAttrL2CacheSize, kL2},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrComputeCapabilityMajor, capability_of(device) / 10},
      {cudaDevAttrComputeCapabilityMinor, capability_of(device) % 10},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrMemoryPoolsSupported, 1},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrGlobalMemoryBusWidth, 5120},
  };
  const auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;  // most others are features, and it lacks them
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  snprintf(text, bytes, "00000000:%02X:00.0", 1 + device);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

// Each device has one pool. The stand-in ignores how much a pool may keep and which devices it lets in.
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(uintptr_t(1 + device));
  return outcome();
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return outcome(); }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  return *static_cast<uint64_t*>(value) = 0, outcome();
}
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return outcome(); }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return outcome(); }

// torch registers its own kernels as it is loaded. They are machine code of GPUs and never run here: a launch of one
// calls a function that the stand-in lacks, and is refused by name.
API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
