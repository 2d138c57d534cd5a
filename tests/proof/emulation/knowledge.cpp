#include "knowledge.h"

#include <algorithm>

namespace emulation {
namespace {

bool precedes(const Known& a, const Known& b) { return a.block < b.block; }

// If the two tell of different threads between the same barriers, only one thread can be kept. Then all that the block
// has done up to the later tick counts as known, because no race may be reported that isn't one.
Known merge(const Known& a, const Known& b) {
  const Known &last = a.barrier > b.barrier ? a : b, &first = &last == &a ? b : a;
  if (first.tick <= last.barrier) return last;
  const Known& later = a.tick > b.tick ? a : b;
  if (a.barrier == b.barrier && a.thread == b.thread) return later;
  return {later.block, later.tick, later.tick, later.tick, later.thread};
}

}  // namespace

void Knowledge::learn(const Known& news) {
  const auto at = std::lower_bound(known_.begin(), known_.end(), news, precedes);
  if (at == known_.end() || at->block != news.block) {
    known_.insert(at, news);
  } else {
    *at = merge(*at, news);
  }
}

void Knowledge::learn(const Knowledge& news) {
  if (news.empty()) return;
  std::vector<Known> all;
  all.reserve(known_.size() + news.known_.size());
  auto mine = known_.begin();
  for (const Known& it : news.known_) {
    while (mine != known_.end() && precedes(*mine, it)) all.push_back(*mine++);
    const bool is_mine_too = mine != known_.end() && mine->block == it.block;
    all.push_back(is_mine_too ? merge(*mine++, it) : it);
  }
  all.insert(all.end(), mine, known_.end());
  known_.swap(all);
}

bool Knowledge::covers(const Access& access) const {
  const auto at = std::lower_bound(known_.begin(), known_.end(), Known{access.block(), 0, 0, 0, 0}, precedes);
  if (at == known_.end() || at->block != access.block()) return false;
  if (access.tick() < at->barrier) return true;
  switch (access.doer()) {
    case Access::thread:
      if (access.last_thread() == at->thread && access.tick() < at->tick) return true;
      [[fallthrough]];
    case Access::lanes_of_warp:
      return access.last_thread() / 32 == at->thread / 32 && access.tick() < at->warp;
    default:
      return false;
  }
}

}  // namespace emulation
