#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace emulation {

std::string text(const uint3& i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

std::string text(const Place& place) { return std::string(" at ") + place.file + ":" + std::to_string(place.line); }

namespace {

bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }

bool same_wait(const Thread& a, const Thread& b) {
  return a.state == b.state && a.mask == b.mask && a.place.line == b.place.line && same(a.name, b.name) &&
         same(a.place.file, b.place.file);
}

std::string doing(const Thread& t) {
  const std::string thread = "thread " + text(t.index);
  if (t.state == State::exited) return thread + " has exited";
  char mask[32];
  snprintf(mask, sizeof(mask), " with mask 0x%x", t.mask);
  return thread + " waits in " + t.name + (t.state == State::in_warp_meeting ? mask : "") + text(t.place);
}

}  // namespace

void Block::start(unsigned number, dim3 size, void (*body)()) {
  number_ = number;
  tick_ = barrier_ = 0;
  known_.forget();
  size_ = size.x * size.y * size.z;
  while (threads_.size() < size_) threads_.push_back(std::make_unique<Thread>(body));
  for (unsigned i = 0; i < size_; ++i) {
    Thread& t = *threads_[i];
    t.state = State::ready;
    t.number = i;
    t.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    t.met_at = t.synced_at = 0;
    for (Knowledge* it : {&t.known, &t.acquired, &t.released}) it->forget();
  }
}

bool Block::exited() const {
  return std::all_of(threads_.begin(), threads_.begin() + size_,
                     [](const auto& t) { return t->state == State::exited; });
}

// Returns null for a lane beyond the end of the block.
Thread* Block::lane_of_warp(const Thread& t, unsigned lane) const {
  const unsigned number = t.number / 32 * 32 + lane;
  return number < size_ ? threads_[number].get() : nullptr;
}

// Returns the first lane of the mask that has not come to where `t` waits, or 32 if all have.
unsigned Block::missing_lane(const Thread& t) const {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(t.mask >> lane & 1)) continue;
    const Thread* other = lane_of_warp(t, lane);
    const bool gone = !other || other->state == State::exited;
    if (gone ? t.kind == Meeting::shuffle : !same_wait(t, *other)) return lane;
  }
  return 32;
}

void Block::finish_meetings(unsigned first) {
  for (unsigned i = first; i < std::min(first + 32, size_); ++i) {
    const Thread& t = *threads_[i];
    if (t.state == State::in_warp_meeting && missing_lane(t) == 32) release_meeting(t);
  }
}

void Block::release_meeting(const Thread& t) {
  Thread* lanes[32] = {};
  Knowledge known;
  ++tick_;
  for (unsigned lane = 0; lane < 32; ++lane) {
    Thread* other = t.mask >> lane & 1 ? lane_of_warp(t, lane) : nullptr;
    if (!other || other->state == State::exited) continue;
    lanes[lane] = other;
    if (t.kind == Meeting::sync) known.learn(other->known);
  }
  for (Thread* other : lanes) {
    if (!other) continue;
    const Thread* source = lanes[other->source];
    other->met = source ? source->value : ~uint64_t(0);
    other->state = State::ready;
    other->met_at = tick_;
    if (t.kind == Meeting::shuffle) continue;
    other->synced_at = tick_;
    other->known = known;
  }
}

std::string Block::finish_barrier() {
  int count = 0;
  for (unsigned i = 0; i < size_; ++i) {
    const Thread& t = *threads_[i];
    if (t.state == State::in_warp_meeting) {
      const unsigned lane = missing_lane(t);
      const Thread* missing = lane_of_warp(t, lane);
      return doing(t) + ", but its lane " + std::to_string(lane) +
             (missing ? ", " + doing(*missing) : " does not exist");
    }
    if (!same_wait(t, *threads_[0])) return doing(t) + ", but " + doing(*threads_[0]);
    count += t.value != 0;
  }
  barrier_ = ++tick_;
  for (unsigned i = 0; i < size_; ++i) {
    threads_[i]->count = count;
    threads_[i]->state = State::ready;
    if (threads_[i]->known.empty()) continue;
    known_.learn(threads_[i]->known);
    threads_[i]->known.forget();
  }
  return "";
}

void Block::fence(Thread& t) {
  t.known.learn(t.acquired);
  t.acquired.forget();
  t.released = known_;
  t.released.learn(t.known);
  t.released.learn(Known{number_, barrier_, t.synced_at, ++tick_, static_cast<uint16_t>(t.number)});
}

// Answers has_done for what was done since the last barrier, or in another block.
bool Block::has_done_since(const Access& before, bool is_write, const Thread& t) const {
  if (before.block() != number_) return known_.covers(before) || t.known.covers(before);
  if (before.doer() == Access::thread && before.last_thread() == t.number) return true;
  const bool in_warp = before.doer() != Access::warps && before.last_thread() / 32 == t.number / 32;
  if (in_warp && before.tick() < (is_write ? t.synced_at : t.met_at)) return true;
  return !t.known.empty() && t.known.covers(before);
}

}  // namespace emulation
