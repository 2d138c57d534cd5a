// Runs a grid as CUDA may run it, not as one would like it to. A few blocks at a time take turns, which end at
// barriers, atomics and fences. Blocks, warps and lanes come in an order that changes from launch to launch and from
// block to block; a warp runs ahead as far as it can before the next one starts, and a lane until it meets its warp;
// shared memory starts as NaN. Whatever relies on luck shows; a race (races.h) without luck, too.
#include "scheduler.h"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

// The seed of the next launch's order; it grows by 1 with each launch. A test that sets it sees the same orders again.
extern "C" __attribute__((visibility("default"))) unsigned emulation_seed = 20;

namespace emulation {

Resident* resident;
Thread* running;
Races races;

namespace {

std::minstd_rand random_number;

// Gives each number below `count` once: ascending, descending or scattered.
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

constexpr unsigned kResidents = 3;
Resident residents[kResidents];
bool turn_is_over;
std::optional<SharedMemory> shared_memory;
const std::function<void()>* thread_body;
std::string failure;

void run_thread() {
  (*thread_body)();
  running->state = State::exited;
}

void run(Thread& t) {
  running = &t;
  built.thread_index = t.index;
  t.fiber.resume();
  const std::string race = races.settle();
  if (failure.empty() && !race.empty()) failure = "thread " + text(t.index) + " " + race;
  running = nullptr;
}

// Runs a warp until each lane has exited or waits for other warps, or the block's turn is over.
void run_warp(unsigned first) {
  Block& block = resident->block;
  const unsigned lanes = std::min(32u, block.size() - first);
  Order order(lanes);
  for (bool progress = true; progress; block.finish_meetings(first)) {
    progress = false;
    for (unsigned i = 0; i < lanes; ++i) {
      Thread& t = block[first + order.next()];
      if (t.state != State::ready) continue;
      progress = true;
      run(t);
      if (turn_is_over || !failure.empty()) return;
    }
  }
}

// Runs a block until every thread has exited or stands in a barrier, or one of them has paused.
void take_turn() {
  Block& block = resident->block;
  turn_is_over = false;
  const unsigned warps = (block.size() + 31) / 32;
  Order order(warps);
  for (unsigned i = 0; i < warps; ++i) {
    run_warp(32 * order.next());
    if (turn_is_over || !failure.empty()) return;
  }
  resident->has_block = !block.exited();
  if (resident->has_block) failure = block.finish_barrier();
}

void start_block(uint64_t number) {
  const dim3 grid = built.grid_size;
  resident->index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
  resident->has_block = true;
  resident->block.start(number, built.block_size, run_thread);
  shared_memory->poison();
}

void run_blocks(uint64_t waiting) {
  Order order(waiting);
  resident = residents;
  for (unsigned busy = 0; failure.empty() && waiting + busy > 0; busy -= !resident->has_block) {
    // The next block starts where one has ended. So blocks that never wait use the same stacks, which saves time.
    if (resident->has_block || waiting == 0) {
      do resident = &residents[random_number() % kResidents];
      while (!resident->has_block && waiting == 0);
    }
    shared_memory->enter(resident - residents);
    if (!resident->has_block) start_block((--waiting, ++busy, order.next()));
    built.block_index = resident->index;
    take_turn();
  }
}

}  // namespace

// ---- asked by this library's other files

uintptr_t space_of(const void* memory) {
  return shared_memory->contains(memory) ? uintptr_t(resident - residents + 1) << 56 : 0;
}

void pause() {
  turn_is_over = random_number() % 2 == 0;
  if (turn_is_over) running->fiber.suspend();
}

// ---- asked by kernels

int meet_block(const char* name, bool predicate, Place place) {
  Thread& self = *running;
  self.state = State::in_block_barrier;
  self.name = name, self.place = place, self.mask = 0, self.value = predicate;
  self.fiber.suspend();
  return self.count;
}

uint64_t meet_warp(const char* name, Meeting kind, unsigned mask, uint64_t value, unsigned source, Place place) {
  Thread& self = *running;
  self.state = State::in_warp_meeting;
  self.name = name, self.place = place, self.mask = mask, self.value = value, self.source = source, self.kind = kind;
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

std::string run_grid(dim3 grid, dim3 threads, const std::function<void()>& kernel) {
  const unsigned seed = emulation_seed++;
  random_number.seed(seed * 2654435761u);  // its first numbers after adjacent seeds are alike
  built.grid_size = grid;
  built.block_size = threads;
  thread_body = &kernel;
  shared_memory.emplace(kResidents);
  races.forget();
  run_blocks(uint64_t(grid.x) * grid.y * grid.z);
  shared_memory.reset();
  if (failure.empty()) return "";
  for (Resident& it : residents) it.has_block = false, it.block.forget();
  return "block " + text(resident->index) + ", " + std::exchange(failure, "") + " (seed " + std::to_string(seed) + ")";
}

}  // namespace emulation
