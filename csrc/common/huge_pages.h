// Large memory in pages of 2 MB. The system hands out fresh memory page by page: in pages of 4 KB that takes longer, on
// a virtual machine, than the work that is done in it.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mpk {

inline constexpr uintptr_t kHugePage = 2 << 20;

// Asks for huge pages where they fit into the memory: none is added to it.
inline void ask_for_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage,
                  last = (begin + bytes) / kHugePage * kHugePage;
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // may be refused
#endif
}

}  // namespace mpk
