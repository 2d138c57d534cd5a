// Device memory is memory of the process, but closed while no device works. New memory is NaN, and ends at a page that
// is never open.
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "machine.h"

using namespace standin;

namespace {

constexpr size_t kPage = 4096;
size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::map<uintptr_t, Range>& ranges() {
  static auto& all = *new std::map<uintptr_t, Range>;
  return all;
}

size_t taken[kMostDevices];
unsigned open_devices = 0;  // a bit for each
bool peer_is_enabled[kMostDevices][kMostDevices];

bool is_open(int device) { return !settings().protects || open_devices >> device & 1; }
void protect(const Located& it) {
  const int rights = is_open(it.second.device) ? PROT_READ | PROT_WRITE : PROT_NONE;
  mprotect(reinterpret_cast<void*>(it.first), it.second.bytes, rights);
}
void open(unsigned wanted) {
  const unsigned changed = wanted ^ std::exchange(open_devices, wanted);
  if (!changed || !settings().protects) return;
  for (const Located& it : ranges())
    if (it.second.type == cudaMemoryTypeDevice && changed >> it.second.device & 1) protect(it);
}

// Maps memory at a multiple of a large page's size: to open and close many small pages would take most of the time.
void* map_pages(size_t bytes, int rights) {
  constexpr size_t kLarge = 2 << 20;
  void* const all = mmap(nullptr, bytes + kLarge, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  const size_t before = -reinterpret_cast<uintptr_t>(all) % kLarge;
  char* const at = static_cast<char*>(all) + before;
  if (before) munmap(all, before);
  munmap(at + bytes, kLarge - before);
  if (bytes > kLarge) madvise(at, bytes, MADV_HUGEPAGE);
  return at;
}

cudaError_t release(void* address, cudaMemoryType type) {
  const Located* const it = locate(address);
  if (!it || it->first != reinterpret_cast<uintptr_t>(address) || it->second.type != type)
    return fail(cudaErrorInvalidValue, "what is freed was not allocated");
  const size_t size = in_pages(it->second.bytes) + kPage;
  if (type == cudaMemoryTypeDevice) taken[it->second.device] -= size;
  munmap(address, size);
  ranges().erase(it->first);
  return outcome();
}

}  // namespace

Working::Working(int device, int other) : before_(open_devices) {
  unsigned wanted = other < 0 ? 0 : 1u << other;
  for (int i = 0; i < settings().devices; ++i) wanted |= unsigned(i == device || peer_is_enabled[device][i]) << i;
  open(wanted);
}
Working::~Working() { open(before_); }

// Tests set it: at 1 the next allocation fails, at 2 the one after it.
extern "C" {
__attribute__((visibility("default"))) int standin_allocations_to_failure = 0;
}

void* standin::allocate(int device, size_t bytes) {
  if (standin_allocations_to_failure > 0 && --standin_allocations_to_failure == 0) return nullptr;
  const size_t size = in_pages(bytes) + kPage;
  void* const at = size > free_bytes(device) ? nullptr : map_pages(size, PROT_NONE);
  if (!at) return nullptr;
  taken[device] += size;
  add_device_memory(at, in_pages(bytes), device);
  ranges()[reinterpret_cast<uintptr_t>(at)].bytes = bytes;
  return at;
}
size_t standin::free_bytes(int device) { return settings().memory - taken[device]; }

void standin::add_device_memory(void* at, size_t bytes, int device) {
  mprotect(at, bytes, PROT_READ | PROT_WRITE);
  memset(at, 0xff, bytes);
  protect(
      *ranges().insert_or_assign(reinterpret_cast<uintptr_t>(at), Range{bytes, cudaMemoryTypeDevice, device}).first);
}
void standin::remove_device_memory(void* at, size_t bytes) {
  ranges().erase(reinterpret_cast<uintptr_t>(at));
  madvise(at, bytes, MADV_DONTNEED);
  mprotect(at, bytes, PROT_NONE);
}
bool standin::reserve_bytes(int device, int64_t bytes) {
  if (bytes > static_cast<int64_t>(free_bytes(device))) return false;
  taken[device] += bytes;
  return true;
}

const Located* standin::locate(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto it = ranges().upper_bound(at);
  if (it == ranges().begin()) return nullptr;
  --it;
  return at - it->first < it->second.bytes ? &*it : nullptr;
}

bool standin::is_within(const void* address, size_t bytes) {
  const Located* const it = locate(address);
  return !it || reinterpret_cast<uintptr_t>(address) + bytes <= it->first + it->second.bytes;
}

API cudaError_t cudaMalloc(void** address, size_t bytes) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  *address = bytes ? allocate(current_device, bytes) : nullptr;
  return *address || !bytes ? outcome() : fail(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* address) {
  const Lock lock(machine());
  if (!address) return outcome();
  REFUSE_IF_UNSAFE();
  finish_all();
  return release(address, cudaMemoryTypeDevice);
}
// What a graph has allocated is never freed, because the graph's nodes hold the address.
static std::set<const void*> of_graphs;

API cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t handle) {
  const Lock lock(machine());
  const Stream* const stream = find_stream(handle);
  *address = stream ? allocate(stream->device, bytes) : nullptr;
  if (stream && stream->capture) of_graphs.insert(*address);
  return *address ? outcome() : fail(stream ? cudaErrorMemoryAllocation : cudaErrorInvalidResourceHandle);
}
API cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  const Lock lock(machine());
  Stream* const stream = find_stream(handle);
  const bool is_kept = of_graphs.count(address) || (stream && stream->capture);
  return is_kept ? outcome() : enqueue(stream, [=] { release(address, cudaMemoryTypeDevice); });
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock(machine());
  *free = free_bytes(current_device), *total = settings().memory;
  return outcome();
}

API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  *address = map_pages(in_pages(bytes) + kPage, PROT_READ | PROT_WRITE);
  if (!*address) return fail(cudaErrorMemoryAllocation);
  memset(*address, 0xff, bytes);
  ranges()[reinterpret_cast<uintptr_t>(*address)] = {bytes, cudaMemoryTypeHost, current_device};
  return outcome();
}
API cudaError_t cudaFreeHost(void* address) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  finish_all();
  return address ? release(address, cudaMemoryTypeHost) : outcome();
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* it, const void* address) {
  const Lock lock(machine());
  const Located* const found = locate(address);
  void* const pointer = const_cast<void*>(address);
  *it = {cudaMemoryTypeUnregistered, -2, nullptr, nullptr, {}};
  if (found) *it = {found->second.type, found->second.device, pointer, pointer, {}};
  if (it->type == cudaMemoryTypeDevice) it->hostPointer = nullptr;
  return outcome();
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int other) {
  *can = settings().peers && device != other;
  return outcome();
}
API cudaError_t cudaDeviceEnablePeerAccess(int other, unsigned) {
  const Lock lock(machine());
  if (other < 0 || other >= settings().devices) return fail(cudaErrorInvalidDevice);
  if (!settings().peers || other == current_device) return fail(cudaErrorPeerAccessUnsupported);
  if (peer_is_enabled[current_device][other]) return fail(cudaErrorPeerAccessAlreadyEnabled);
  peer_is_enabled[current_device][other] = true;
  return outcome();
}
