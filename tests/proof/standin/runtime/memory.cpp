// Device memory lies in one arena of the host's for each device, out of the host's reach while no device works. It
// begins as NaN, and behind each allocation comes a page of nothing. Pinned memory is the host's.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "machine.h"

using namespace standin;

namespace {

constexpr size_t kPage = 4096;
size_t in_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::map<uintptr_t, Range>& ranges() {
  static auto& all = *new std::map<uintptr_t, Range>;
  return all;
}

struct Arena {
  char* base;
  size_t used = 0, taken = 0;
  std::map<size_t, size_t> gaps;  // offset, bytes
  std::map<char*, size_t> mapped;  // by the driver's calls, elsewhere
};
std::vector<Arena>& arenas() {
  static auto& all = *[] {
    auto* const it = new std::vector<Arena>(settings().devices);
    for (Arena& arena : *it) {
      void* const at = mmap(nullptr, 4 * settings().memory, settings().protects ? PROT_NONE : PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) say("the host has no address space"), abort();
      arena.base = static_cast<char*>(at);
    }
    return it;
  }();
  return all;
}

unsigned open_devices = 0;  // a bit for each
bool peer_is_enabled[32][32];

void protect(char* at, size_t bytes, bool is_open) {
  if (bytes && settings().protects) mprotect(at, bytes, is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
}
void open(unsigned wanted) {
  for (int i = 0; i < settings().devices; ++i) {
    const bool is_open = wanted >> i & 1;
    if (is_open == (open_devices >> i & 1)) continue;
    const Arena& arena = arenas()[i];
    protect(arena.base, arena.used, is_open);
    for (const auto& [at, bytes] : arena.mapped) protect(at, bytes, is_open);
  }
  open_devices = wanted;
}

size_t find_gap(Arena& arena, size_t size) {
  for (const auto [offset, bytes] : arena.gaps) {
    if (bytes < size) continue;
    arena.gaps.erase(offset);
    if (bytes > size) arena.gaps[offset + size] = bytes - size;
    return offset;
  }
  arena.used += size;
  return arena.used - size;
}

void leave_gap(Arena& arena, size_t offset, size_t size) {
  const auto it = arena.gaps.emplace(offset, size).first;
  const auto next = std::next(it);
  if (next != arena.gaps.end() && offset + size == next->first) it->second += next->second, arena.gaps.erase(next);
  if (it == arena.gaps.begin()) return;
  const auto previous = std::prev(it);
  if (previous->first + previous->second == offset) previous->second += it->second, arena.gaps.erase(it);
}

cudaError_t release(void* address) {
  const Located* const it = locate(address);
  if (!it || it->first != reinterpret_cast<uintptr_t>(address) || it->second.type != cudaMemoryTypeDevice)
    return fail(cudaErrorInvalidValue, "what is freed was not allocated");
  Arena& arena = arenas()[it->second.device];
  const size_t size = in_pages(it->second.bytes) + kPage;
  madvise(address, size, MADV_DONTNEED);
  leave_gap(arena, static_cast<char*>(address) - arena.base, size);
  arena.taken -= size;
  forget(address);
  return cudaSuccess;
}

cudaError_t release_host(void* address, bool is_ours) {
  const Located* const it = locate(address);
  if (!it || it->second.type != cudaMemoryTypeHost) return fail(cudaErrorInvalidValue, "not pinned memory");
  finish_all();
  if (is_ours) munmap(address, in_pages(it->second.bytes));
  forget(address);
  return cudaSuccess;
}

}  // namespace

Working::Working(int device, int other) : before_(open_devices) {
  unsigned wanted = other < 0 ? 0 : 1u << other;
  for (int i = 0; i < settings().devices; ++i) wanted |= unsigned(i == device || peer_is_enabled[device][i]) << i;
  open(wanted);
}
Working::~Working() { open(before_); }

void* standin::allocate(int device, size_t bytes) {
  Arena& arena = arenas()[device];
  const size_t size = in_pages(bytes) + kPage;
  if (size > free_bytes(device) || arena.used + size > 4 * settings().memory) return nullptr;
  char* const at = arena.base + find_gap(arena, size);
  arena.taken += size;
  note(at, bytes, cudaMemoryTypeDevice, device);
  protect(at, size, open_devices >> device & 1);
  const Working now(device);
  memset(at, 0xff, bytes);
  return at;
}
size_t standin::free_bytes(int device) { return settings().memory - arenas()[device].taken; }

void standin::note(void* address, size_t bytes, cudaMemoryType type, int device) {
  ranges()[reinterpret_cast<uintptr_t>(address)] = {bytes, type, device};
}
void standin::forget(void* address) { ranges().erase(reinterpret_cast<uintptr_t>(address)); }

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

void standin::map_memory(void* at, size_t bytes, int device) {
  Arena& arena = arenas()[device];
  arena.mapped[static_cast<char*>(at)] = bytes;
  note(at, bytes, cudaMemoryTypeDevice, device);
  mprotect(at, bytes, PROT_READ | PROT_WRITE);
  memset(at, 0xff, bytes);
  protect(static_cast<char*>(at), bytes, open_devices >> device & 1);
}
void standin::unmap_memory(void* at, size_t bytes, int device) {
  arenas()[device].mapped.erase(static_cast<char*>(at));
  forget(at);
  mprotect(at, bytes, PROT_NONE);
  madvise(at, bytes, MADV_DONTNEED);
}
bool standin::reserve_bytes(int device, int64_t bytes) {
  if (bytes > 0 && size_t(bytes) > free_bytes(device)) return false;
  arenas()[device].taken += bytes;
  return true;
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
  return release(address);
}
API cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t handle) {
  const Lock lock(machine());
  Stream* const stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *address = allocate(stream->device, bytes);
  if (!*address) {
    finish_all();  // what is freed on the way is free now
    *address = allocate(stream->device, bytes);
  }
  return *address ? outcome() : fail(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  const Lock lock(machine());
  Stream* const stream = find_stream(handle);
  // What a graph has allocated is the graph's for as long as the process lives: its nodes hold the address.
  return stream && stream->capture ? outcome() : enqueue(stream, [=] { release(address); });
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock(machine());
  *free = free_bytes(current_device), *total = settings().memory;
  return outcome();
}

API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  *address = mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  memset(*address, 0xff, bytes);
  note(*address, bytes, cudaMemoryTypeHost, current_device);
  return outcome();
}
API cudaError_t cudaFreeHost(void* address) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  return address ? release_host(address, true) : outcome();
}
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  note(address, bytes, cudaMemoryTypeHost, current_device);
  return outcome();
}
API cudaError_t cudaHostUnregister(void* address) {
  const Lock lock(machine());
  REFUSE_IF_UNSAFE();
  return release_host(address, false);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* it, const void* address) {
  const Lock lock(machine());
  const Located* const found = locate(address);
  *it = {};
  it->type = found ? found->second.type : cudaMemoryTypeUnregistered;
  it->device = found ? found->second.device : -2;
  it->devicePointer = found ? const_cast<void*>(address) : nullptr;
  it->hostPointer = it->type == cudaMemoryTypeHost ? const_cast<void*>(address) : nullptr;
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
