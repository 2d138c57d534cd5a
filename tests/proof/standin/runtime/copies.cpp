// Copies and memsets, which are work of a stream. What the host may not read yet is NaN: to the host alone. A copy to a
// device that is due before finds what was there.
#include <algorithm>
#include <cstring>
#include <list>

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

// Pinned memory that a copy is on its way to: the host finds NaN there, and devices what it holds in truth.
struct Expected {
  char* at;
  std::string truth;
};
std::list<Expected> expected;  // in the order of calls

template <class Found>
void for_overlaps(std::list<Expected>::iterator from, const void* at, size_t bytes, Found found) {
  for (; from != expected.end(); ++from) {
    const char* const begin = std::max<const char*>(static_cast<const char*>(at), from->at);
    const char* const end = std::min<const char*>(static_cast<const char*>(at) + bytes, from->at + from->truth.size());
    if (begin < end) found(*from, begin, end - begin);
  }
}
std::string truth_of(const void* at, size_t bytes) {
  std::string found(static_cast<const char*>(at), bytes);
  for_overlaps(expected.begin(), at, bytes, [&](const Expected& it, const char* begin, size_t size) {
    memcpy(&found[begin - static_cast<const char*>(at)], &it.truth[begin - it.at], size);
  });
  return found;
}
std::list<Expected>::iterator expect(void* at, size_t bytes) {
  expected.push_back({static_cast<char*>(at), truth_of(at, bytes)});
  memset(at, 0xff, bytes);
  return std::prev(expected.end());
}
// The copy's work. What a later copy is on its way to stays NaN for the host.
void arrive(std::list<Expected>::iterator it, const void* data) {
  char* const at = it->at;
  const size_t bytes = it->truth.size();
  const auto later = expected.erase(it);
  memcpy(at, data, bytes);
  for_overlaps(later, at, bytes, [&](Expected& other, const char* begin, size_t size) {
    memcpy(&other.truth[begin - other.at], static_cast<const char*>(data) + (begin - at), size);
    memset(const_cast<char*>(begin), 0xff, size);
  });
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
  const bool reads_pinned = is_of_type(source, cudaMemoryTypeHost);
  const auto move = [=](const void* data) {
    const Working open(there, here);
    if (reads_pinned && !expected.empty()) {
      memcpy(to, truth_of(data, bytes).data(), bytes);
    } else {
      memcpy(to, data, bytes);
    }
  };
  const bool is_captured = stream->capture != nullptr;
  const bool is_pageable = !source && !is_captured;
  const auto staged =
      std::make_shared<std::string>(is_pageable ? static_cast<const char*>(from) : "", is_pageable ? bytes : 0);
  if (!to_device && is_of_type(target, cudaMemoryTypeHost) && !is_captured) {
    if (const cudaError_t error = outcome()) return error;
    const auto it = expect(to, bytes);
    const cudaError_t error = enqueue(stream, [=] {
      const Working open(there, here);
      arrive(it, from);
    });
    if (error != cudaSuccess) arrive(it, std::string(it->truth).data());
    if (error == cudaSuccess && host == Host::waits) finish(stream, stream->enqueued);
    return error;
  }
  const cudaError_t error = enqueue(stream, [=] { move(is_pageable ? staged->data() : from); });
  if (error != cudaSuccess || is_captured) return error;
  if (host == Host::waits || (!to_device && !target)) {
    finish(stream, stream->enqueued);
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
