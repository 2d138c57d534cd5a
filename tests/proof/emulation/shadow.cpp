#include "shadow.h"

namespace emulation {

static constexpr size_t kPagesKept = 1 << 16;  // 100 MB or more
static constexpr unsigned kLog2Granule = 3;

void Shadow::forget() {
  ++launch_;
  lists_.clear();
  if (pages_.size() < kPagesKept) return;
  pages_.clear();
  for (auto& it : recent_) it = {};
}

std::vector<Access>* Shadow::new_list() {
  lists_.push_back(std::make_unique<std::vector<Access>>());
  return lists_.back().get();
}

Shadow::Page& Shadow::page_of(uintptr_t number) {
  auto& recent = recent_[number % 256];
  if (!recent.page || recent.number != number) recent = {number, &pages_[number]};
  Page& page = *recent.page;
  if (page.launch != launch_) {
    page.launch = launch_;
    page.log2_granule = kLog2Granule;
    page.cells.assign(kPage >> kLog2Granule, Cell());
  }
  return page;
}

// Halves the page's cells. Each half keeps the accesses of the whole.
void Shadow::split(Page& page) {
  const size_t wholes = page.cells.size();
  page.cells.resize(2 * wholes);
  for (size_t i = wholes; i-- > 0;) {
    const Cell whole = page.cells[i];
    page.cells[2 * i] = page.cells[2 * i + 1] = whole;
    if (whole.more_reads) *(page.cells[2 * i].more_reads = new_list()) = *whole.more_reads;
  }
  --page.log2_granule;
}

}  // namespace emulation
