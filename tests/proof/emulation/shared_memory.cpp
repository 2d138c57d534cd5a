#include "shared_memory.h"

#include <link.h>

#include <algorithm>
#include <stdexcept>

#include "emulation/scheduler.h"

namespace emulation {
namespace {

thread_local volatile char inside;  // any thread-local variable of this library

// The calling thread's copy of this library's thread-local storage.
struct Segment {
  char* begin;
  size_t size;
};

int find_segment(dl_phdr_info* library, size_t, void* found) {
  const char* const probe = const_cast<const char*>(&inside);
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    if (library->dlpi_phdr[i].p_type != PT_TLS) continue;
    const Segment it = {static_cast<char*>(library->dlpi_tls_data), library->dlpi_phdr[i].p_memsz};
    if (!it.begin || probe < it.begin || probe >= it.begin + it.size) continue;
    *static_cast<Segment*>(found) = it;
    return 1;
  }
  return 0;
}

struct alignas(16) Chunk {
  char bytes[16];
};
std::vector<Chunk> dynamic;

}  // namespace

void* dynamic_shared() { return dynamic.data(); }

SharedMemory::SharedMemory(size_t dynamic_bytes, unsigned blocks) : values_(blocks) {
  dynamic.resize((dynamic_bytes + sizeof(Chunk) - 1) / sizeof(Chunk));
  dynamic_begin_ = static_cast<char*>(dynamic_shared());
  dynamic_size_ = dynamic.size() * sizeof(Chunk);
  inside = 0;  // the segment is allocated at the first access
  Segment segment;
  if (!dl_iterate_phdr(find_segment, &segment)) throw std::runtime_error("emulated CUDA: found no __shared__ memory");
  begin_ = segment.begin;
  host_values_.assign(begin_, begin_ + segment.size);
  for (auto& values : values_) values.resize(segment.size + dynamic_size_);
}

SharedMemory::~SharedMemory() { std::copy(host_values_.begin(), host_values_.end(), begin_); }

void SharedMemory::enter(unsigned block) {
  if (block == block_) return;
  const size_t size = host_values_.size();
  char* const kept = values_[block_].data();
  std::copy_n(begin_, size, kept);
  std::copy_n(dynamic_begin_, dynamic_size_, kept + size);
  const char* const values = values_[block_ = block].data();
  std::copy_n(values, size, begin_);
  std::copy_n(values + size, dynamic_size_, dynamic_begin_);
}

void SharedMemory::poison() {
  std::fill_n(begin_, host_values_.size(), 0xff);
  std::fill_n(dynamic_begin_, dynamic_size_, 0xff);
}

}  // namespace emulation
