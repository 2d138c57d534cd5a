// Copies and memsets, which are work of a stream. What the host may not read yet is NaN.
#include <cstring>

#include "machine.h"

using namespace standin;

namespace {

enum class Host { goes_on, waits };

bool is_of_type(const Located* it, cudaMemoryType type) { return it && it->second.type == type; }

bool contradicts(cudaMemcpyKind kind, bool to_device, bool from_device) {
  const cudaMemcpyKind kinds[2][2] = {{cudaMemcpyHostToHost, cudaMemcpyDeviceToHost},
                                      {cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice}};
  return kind != cudaMemcpyDefault && kind != kinds[to_device][from_device];
}

// Pageable memory is read before the call returns, and written before it returns; pinned memory, when the stream comes
// to it.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle, Host host) {
  Stream* const stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return outcome();
  const Located *const target = locate(to), *const source = locate(from);
  const bool to_device = is_of_type(target, cudaMemoryTypeDevice);
  const bool from_device = is_of_type(source, cudaMemoryTypeDevice);
  if (contradicts(kind, to_device, from_device)) return fail(cudaErrorInvalidValue, "a copy in another direction");
  if (!is_within(to, bytes) || !is_within(from, bytes)) return fail(cudaErrorInvalidValue, "beyond an allocation");
  const int there = to_device ? target->second.device : stream->device;
  const int here = from_device ? source->second.device : -1;
  const auto move = [=](const void* data) {
    const Working open(there, here);
    memcpy(to, data, bytes);
  };
  const bool is_captured = stream->capture != nullptr;
  const bool is_pageable = !source && !is_captured;
  const auto staged =
      std::make_shared<std::string>(is_pageable ? static_cast<const char*>(from) : "", is_pageable ? bytes : 0);
  const cudaError_t error = enqueue(stream, [=] { move(is_pageable ? staged->data() : from); });
  if (error != cudaSuccess || is_captured) return error;
  if (host == Host::waits || (!to_device && !target)) {
    finish(stream, stream->enqueued);
  } else if (!to_device && stream->is_pending()) {
    memset(to, 0xff, bytes);
  }
  return outcome();
}

cudaError_t set(void* to, int byte, size_t bytes, cudaStream_t handle) {
  const Located* const target = locate(to);
  if (bytes == 0) return outcome();
  if (!target || !is_within(to, bytes)) return fail(cudaErrorInvalidValue, "beyond an allocation");
  return enqueue(find_stream(handle), [=, of = target->second.device] {
    const Working open(of);
    memset(to, byte, bytes);
  });
}

}  // namespace

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock lock(machine());
  return copy(to, from, bytes, kind, stream, Host::goes_on);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  return copy(to, from, bytes, kind, nullptr, Host::waits);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                    cudaStream_t stream) {
  const Lock lock(machine());
  const Located *const target = locate(to), *const source = locate(from);
  if (!target || !source || target->second.device != to_device || source->second.device != from_device)
    return fail(cudaErrorInvalidValue, "memory of other devices");
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream, Host::goes_on);
}
API cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream) {
  const Lock lock(machine());
  return set(to, byte, bytes, stream);
}
API cudaError_t cudaMemset(void* to, int byte, size_t bytes) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  return set(to, byte, bytes, nullptr);
}
