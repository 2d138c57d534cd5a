// What CUDA refuses of launches, with a GPU or without: tests/proof/standin has this, too.
#include <map>
#include <mutex>

#include "runtime.h"

namespace {

std::mutex one_at_a_time;
std::map<const void*, size_t> opted_in_shared_bytes;

}  // namespace

cudaError_t emulation::check_launch(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  if (config.numAttrs != 0) return cudaErrorNotSupported;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0 ||
      grid.x > 0x7fffffff || grid.y > 0xffff || grid.z > 0xffff || block.x > 1024 || block.y > 1024 || block.z > 64 ||
      block.x * block.y * block.z > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const auto opted_in = opted_in_shared_bytes.find(kernel);
  const size_t limit = opted_in == opted_in_shared_bytes.end() ? kSharedBytes : opted_in->second;
  return config.dynamicSmemBytes > limit ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > emulation::kSharedBytesOptIn) return emulation::remember(cudaErrorInvalidValue);
  opted_in_shared_bytes[kernel] = value;
  return cudaSuccess;
}
