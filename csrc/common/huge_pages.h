// Asks for pages of 2 MB for large memory. The system hands out fresh memory page by page: in pages of 4 KB, on a
// virtual machine, that takes longer than the work on the memory.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mpk {

inline constexpr uintptr_t kHugePage = 2 << 20;

// Asks for huge pages where whole ones lie within the memory.
inline void ask_for_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage,
                  last = (begin + bytes) / kHugePage * kHugePage;
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // may be refused
#endif
}

}  // namespace mpk
