// Runs a grid as CUDA may run it, not as one would like it to. Blocks, warps and lanes come in an order that changes
// from launch to launch and from block to block; a warp runs ahead as far as it can before the next one starts, and a
// lane until it meets its warp; shared memory starts as NaN. Whatever relies on luck shows.
#include "emulation/scheduler.h"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <utility>

#include "block.h"
#include "shared_memory.h"

namespace emulation {
namespace {

std::minstd_rand random_number(20);  // a process repeats its orders run after run

// The numbers below `count`, each once: ascending, descending or scattered.
class Order {
 public:
  explicit Order(uint64_t count) : count_(count), next_(0), stride_(1) {
    const auto kind = random_number() % 3;
    if (kind == 1) next_ = stride_ = count - 1;
    if (kind == 2) {
      next_ = random_number() % count;
      do stride_ = random_number() % count + 1;
      while (std::gcd(stride_, count) != 1);
    }
  }
  uint64_t next() {
    const uint64_t now = next_;
    next_ += stride_;
    if (next_ >= count_) next_ -= count_;
    return now;
  }

 private:
  uint64_t count_, next_, stride_;
};

Block block;
Thread* running;
const std::function<void()>* thread_body;
std::string failure;

void run_thread() {
  (*thread_body)();
  running->state = State::exited;
}

// Until each lane has exited or waits for what this warp alone cannot give.
void run_warp(unsigned first) {
  const unsigned lanes = std::min(32u, block.size() - first);
  Order order(lanes);
  for (bool progress = true; progress; block.finish_meetings(first)) {
    progress = false;
    for (unsigned i = 0; i < lanes; ++i) {
      Thread& t = block[first + order.next()];
      if (t.state != State::ready) continue;
      progress = true;
      running = &t;
      thread_index = t.index;
      t.fiber.resume();
      running = nullptr;
      if (!failure.empty()) return;
    }
  }
}

void run_block() {
  block.start(block_size, run_thread);
  for (;;) {
    const unsigned warps = (block.size() + 31) / 32;
    Order order(warps);
    for (unsigned i = 0; i < warps; ++i) {
      run_warp(32 * order.next());
      if (!failure.empty()) return;
    }
    if (block.exited()) return;
    failure = block.finish_barrier();
    if (!failure.empty()) return;
  }
}

}  // namespace

int meet_block(const char* name, bool predicate, Place place) {
  Thread& self = *running;
  self.state = State::in_block_barrier;
  self.name = name, self.place = place, self.mask = 0, self.value = predicate;
  self.fiber.suspend();
  return self.count;
}

Met meet_warp(const char* name, unsigned mask, uint64_t value, unsigned source, Exited exited, Place place) {
  Thread& self = *running;
  self.state = State::in_warp_meeting;
  self.name = name, self.place = place, self.mask = mask, self.value = value, self.source = source;
  self.exited = exited;
  if (!(mask >> lane() & 1)) fail(std::string("is not in the mask it gives to ") + name + text(place));
  self.fiber.suspend();
  return self.met;
}

unsigned lane() { return running->number % 32; }

void fail(const std::string& what) {
  if (!running) {
    fprintf(stderr, "emulated CUDA: the host %s\n", what.c_str());
    abort();
  }
  failure = "thread " + text(running->index) + " " + what;
  running->fiber.suspend();
  __builtin_unreachable();  // nobody resumes a thread of a failed launch
}

std::string run_grid(dim3 grid, dim3 threads, size_t dynamic_shared_bytes, const std::function<void()>& kernel) {
  grid_size = grid;
  block_size = threads;
  thread_body = &kernel;
  SharedMemory shared(dynamic_shared_bytes);
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  Order order(blocks);
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t number = order.next();
    block_index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
    shared.poison();
    run_block();
    if (failure.empty()) continue;
    block.forget();
    return "block " + text(block_index) + ", " + std::exchange(failure, "");
  }
  return "";
}

}  // namespace emulation
