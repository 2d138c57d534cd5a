// Devices, what they say of themselves, and torch's own kernels, which nobody computes: aten.cpp replaces aten's.
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "machine.h"

using namespace standin;

namespace {

constexpr int kMultiprocessors = 132;
constexpr size_t kShared = 48 << 10, kSharedOptIn = 227 << 10, kSharedOfMultiprocessor = 228 << 10, kL2 = 50 << 20;

bool is_device(int device) { return device >= 0 && device < settings().devices; }
int capability_of(int device) {
  const std::vector<int>& all = settings().capabilities;
  return all[std::min<size_t>(device, all.size() - 1)];
}

std::unordered_map<const void*, std::string>& kernel_names() {
  static auto& all = *new std::unordered_map<const void*, std::string>;
  return all;
}
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  const Lock lock(machine());
  const auto found = kernel_names().find(kernel);
  const std::string name = found == kernel_names().end() ? "?" : found->second;
  if (name.find("spin_kernel") != std::string::npos) return enqueue(find_stream(stream), [] {});  // torch.cuda._sleep
  return fail(cudaErrorInvalidDeviceFunction, ("nobody computes the kernel " + name).c_str());
}

}  // namespace

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (settings().driver / 1000 < CUDART_VERSION / 1000) return fail(cudaErrorInsufficientDriver);
  if (settings().devices == 0) return fail(cudaErrorNoDevice);
  *count = settings().devices;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return outcome();
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = settings().driver;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
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
  it->sharedMemPerMultiprocessor = kSharedOfMultiprocessor;
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
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedOfMultiprocessor},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
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
      {cudaDevAttrPciBusId, 1 + device},
  };
  const auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;  // of features that it lacks, most
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
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// The one pool of each device. What it may keep, and which device it lets in, is nothing to the stand-in.
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(uintptr_t(1 + device));
  return outcome();
}
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return outcome(); }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  const Lock lock(machine());
  *static_cast<uint64_t*>(value) = settings().memory - free_bytes(static_cast<int>(reinterpret_cast<uintptr_t>(pool)) - 1);
  return outcome();
}
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return outcome(); }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return outcome(); }

// ---- kernels, as nvcc's code registers and launches them

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  kernel_names()[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration it = configurations.back();
  configurations.pop_back();
  *grid = it.grid, *block = it.block, *shared = it.shared, *static_cast<void**>(stream) = it.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* it, const void*) {
  *it = {};
  it->maxThreadsPerBlock = 1024, it->binaryVersion = it->ptxVersion = capability_of(current_device);
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
