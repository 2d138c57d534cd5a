// The driver's functions that torch calls: the same library stands in for libcuda.so.1, and for libnvidia-ml.so.1.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstring>

#include "machine.h"

using namespace standin;

namespace {

struct Memory {
  size_t bytes;
  int device;
};
std::map<CUdeviceptr, Memory> mappings;

constexpr size_t kGranularity = 2 << 20;
CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(uintptr_t(0x1000 + device)); }
CUresult as_result(cudaError_t error) { return static_cast<CUresult>(error); }  // the numbers are the same

template <class Each>
CUresult for_each_mapping(CUdeviceptr from, size_t bytes, const Each& each) {
  auto it = mappings.find(from);
  for (size_t past = 0; past < bytes;) {
    if (it == mappings.end() || it->first != from + past) return CUDA_ERROR_INVALID_VALUE;
    past += it->second.bytes;
    const auto next = std::next(it);
    each(it);
    it = next;
  }
  return CUDA_SUCCESS;
}

}  // namespace

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { return as_result(cudaDriverGetVersion(version)); }
API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < settings().devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) return *value = 1, CUDA_SUCCESS;
  return as_result(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0, *is_active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) { return *context = context_of(current_device), CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext context) {
  return as_result(cudaSetDevice(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 0x1000));
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

// ---- addresses that are chosen first and given memory later, as expandable segments do

API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  const Lock lock(machine());
  void* const at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  const Lock lock(machine());
  const auto first = mappings.lower_bound(address);
  if (first != mappings.end() && first->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* wanted,
                         unsigned long long) {
  const Lock lock(machine());
  const int device = wanted->location.id;
  if (bytes % kGranularity) return CUDA_ERROR_INVALID_VALUE;
  if (!reserve_bytes(device, static_cast<int64_t>(bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Memory{bytes, device});
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Lock lock(machine());
  const std::unique_ptr<Memory> it(reinterpret_cast<Memory*>(handle));
  reserve_bytes(it->device, -static_cast<int64_t>(it->bytes));
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr at, size_t, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  const Lock lock(machine());
  const bool is_new = mappings.emplace(at, *reinterpret_cast<Memory*>(handle)).second;
  return is_new ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* who, size_t count) {
  const Lock lock(machine());
  return for_each_mapping(at, bytes, [=](auto it) {
    void* const there = reinterpret_cast<void*>(it->first);
    for (size_t i = 0; i < count; ++i)
      if (who[i].location.id == it->second.device && !locate(there))
        add_device_memory(there, it->second.bytes, it->second.device);
  });
}
API CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  const Lock lock(machine());  // and waits for nothing: work that comes to this memory later fails
  return for_each_mapping(at, bytes, [](auto it) {
    remove_device_memory(reinterpret_cast<void*>(it->first), it->second.bytes);
    mappings.erase(it);
  });
}
API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  const Lock lock(machine());
  const Located* const it = locate(reinterpret_cast<void*>(address));
  if (!it) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = it->first;
  if (bytes) *bytes = it->second.bytes;
  return CUDA_SUCCESS;
}

// torch asks NVML whether a segment can be shared with other machines, and, when memory is out, which processes hold
// it.
API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = &mappings, 0; }
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // torch hands in zeros, which say that there is none
#define UNSUPPORTED(function) \
  API int function() { return 3; }
UNSUPPORTED(nvmlDeviceGetComputeRunningProcesses)
UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlSystemGetCudaDriverVersion_v2)

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(unsupported), &here);
  void* const self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *function = dlsym(self, name);
  if (!*function) *function = dlsym(self, (std::string(name) + "_v2").c_str());
  // torch goes without these where it does not find them, and asks for the others at once.
  bool is_optional = false;
  for (const char* each : {"Logs", "Multicast", "Green", "DevResource"}) is_optional |= strstr(name, each) != nullptr;
  if (!*function && !is_optional) *function = reinterpret_cast<void*>(unsupported);
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
