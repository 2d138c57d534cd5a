// The last accesses to each byte of memory during a launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "knowledge.h"

namespace emulation {

struct Cell {
  Access write, read;
  std::vector<Access>* more_reads;  // the last read of each other block since the write, ordered by block
};

// A cell stands for 8 bytes, until an access takes fewer: then for as many as that.
class Shadow {
 public:
  void forget();  // before a launch

  // Calls visit(cell) for each cell of the memory that begins at `address`.
  template <class Visit>
  void visit(uintptr_t address, size_t bytes, const Visit& visit) {
    for (const uintptr_t end = address + bytes; address < end;) {
      Page& page = page_of(address / kPage);
      const uintptr_t end_here = std::min(end, (address / kPage + 1) * kPage);
      while ((address | end_here) & ((1u << page.log2_granule) - 1)) split(page);
      for (; address < end_here; address += 1u << page.log2_granule) {
        visit(page.cells[address % kPage >> page.log2_granule]);
      }
    }
  }
  std::vector<Access>* new_list();

 private:
  static constexpr uintptr_t kPage = 512;
  struct Page {
    uint64_t launch = 0;
    unsigned log2_granule;
    std::vector<Cell> cells;
  };
  Page& page_of(uintptr_t number);
  void split(Page& page);

  uint64_t launch_ = 0;
  std::unordered_map<uintptr_t, Page> pages_;
  struct {
    uintptr_t number;
    Page* page;
  } recent_[256] = {};  // by the low bits of a page's number
  std::vector<std::unique_ptr<std::vector<Access>>> lists_;
};

}  // namespace emulation
