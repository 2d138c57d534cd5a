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

}  // namespace

SharedMemory::SharedMemory(unsigned blocks) : values_(blocks) {
  inside = 0;  // the segment is allocated at the first access
  Segment segment;
  if (!dl_iterate_phdr(find_segment, &segment)) throw std::runtime_error("emulated CUDA: found no __shared__ memory");
  begin_ = segment.begin;
  host_values_.assign(begin_, begin_ + segment.size);
  for (auto& values : values_) values.resize(segment.size);
}

SharedMemory::~SharedMemory() { std::copy(host_values_.begin(), host_values_.end(), begin_); }

void SharedMemory::enter(unsigned block) {
  if (block == block_) return;
  std::copy_n(begin_, host_values_.size(), values_[block_].data());
  block_ = block;
  std::copy(values_[block].begin(), values_[block].end(), begin_);
}

void SharedMemory::poison() { std::fill_n(begin_, host_values_.size(), 0xff); }

}  // namespace emulation
