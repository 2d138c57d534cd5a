#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

namespace emulation {
namespace {

std::string place_of(const void* code) {
  Dl_info library;
  if (!code || !dladdr(code, &library)) return "";
  char address[32];
  snprintf(address, sizeof(address), "%#tx",
           static_cast<const char*>(code) - static_cast<char*>(library.dli_fbase) - 1);
  return std::string("; addr2line -Cfie ") + library.dli_fname + " " + address + " tells where";
}

std::string who(const Access& access) {
  const auto index = [](unsigned number, const dim3& size) {
    return text(uint3{number % size.x, number / size.x % size.y, number / size.x / size.y});
  };
  const bool is_one = access.doer() == Access::thread;
  return (is_one ? "thread " + index(access.last_thread(), built.block_size) : std::string("several threads")) +
         " of block " + index(access.block(), built.grid_size);
}

__attribute__((cold)) std::string race(const char* verb, const Touch& touch, const Access& other, const char* done) {
  return std::string(verb) + " " + std::to_string(touch.bytes) + " bytes that " + who(other) + " " + done +
         ", and nothing orders the two" + place_of(touch.code);
}

__attribute__((cold)) std::string stale(const Touch& touch, const Access& other) {
  return "reads " + std::to_string(touch.bytes) + " bytes that " + who(other) +
         " wrote, but may find older ones in the L1 cache: __ldcg reads past it" + place_of(touch.code);
}

Access access_of(const Touch& touch, const Block& block, const Thread& thread) {
  return {block.number(), block.tick(), thread.number, Access::thread, touch.path == Path::atomic};
}

}  // namespace

void Races::forget() {
  shadow_.forget();
  released_.clear();
  suspected_.touch.memory = nullptr;
}

// Calls check(cell, wrong), which sets `wrong` to a sentence if anything is.
template <class Check>
std::string Races::visit(const Touch& touch, const Block& block, const Check& check) {
  std::string wrong = settle();
  const auto address = reinterpret_cast<uintptr_t>(touch.memory) + touch.block_space;
  shadow_.visit(address, touch.bytes, [&](Cell& cell) {
    const Access& any = cell.write.doer() == Access::nobody ? cell.read : cell.write;
    if (touch.block_space != 0 && any.block() != block.number()) cell = Cell();  // left by an earlier block
    check(cell, wrong);
  });
  return wrong;
}

std::string Races::read(const Touch& touch, const Block& block, const Thread& thread) {
  const Access now = access_of(touch, block, thread);
  return visit(touch, block, [&](Cell& cell, std::string& wrong) {
    const Access& written = cell.write;
    if (!block.has_done(written, true, thread)) wrong = race("reads", touch, written, "wrote");
    const bool is_foreign = written.doer() != Access::nobody && written.block() != now.block();
    if (is_foreign && touch.path == Path::through_l1 && wrong.empty()) wrong = stale(touch, written);
    note_read(cell, now, block, thread);
  });
}

// Keeps one record of a block's reads: the last one, if the others are ordered before it, else a record that stands for
// several threads.
void Races::note_read(Cell& cell, const Access& now, const Block& block, const Thread& thread) {
  Access& last = cell.read;
  if (last.doer() == Access::warps && last.block() == now.block() &&
      last.tick() >= block.barrier()) {  // the usual case
    last = now.with(Access::warps);
    return;
  }
  bool is_first = block.has_done(last, false, thread);
  if (!is_first && last.block() != now.block()) {
    keep_for_later(cell, now.block());
    is_first = block.has_done(last, false, thread);
  }
  const bool in_one_warp = last.doer() != Access::warps && last.last_thread() / 32 == now.last_thread() / 32;
  last = is_first ? now : now.with(in_one_warp ? Access::lanes_of_warp : Access::warps);
}

// Puts the last read by `block`, if there is one, in the place of another block's, which joins the other reads.
void Races::keep_for_later(Cell& cell, unsigned block) {
  if (!cell.more_reads) cell.more_reads = shadow_.new_list();
  auto& reads = *cell.more_reads;
  const auto find = [&](unsigned block) {
    return std::lower_bound(reads.begin(), reads.end(), block,
                            [](const Access& a, unsigned b) { return a.block() < b; });
  };
  const Access others = std::exchange(cell.read, Access());
  if (const auto mine = find(block); mine != reads.end() && mine->block() == block) {
    cell.read = *mine;
    reads.erase(mine);
  }
  reads.insert(find(others.block()), others);
}

std::string Races::write(const Touch& touch, const Block& block, const Thread& thread) {
  const Access now = access_of(touch, block, thread);
  Access other;
  std::string wrong = visit(touch, block, [&](Cell& cell, std::string& wrong) {
    const auto check_read = [&](const Access& read) {
      if (!block.has_done(read, false, thread)) wrong = race("writes", touch, read, "read");
    };
    check_read(cell.read);
    if (cell.more_reads) std::for_each(cell.more_reads->begin(), cell.more_reads->end(), check_read);
    const bool are_atomic = now.is_atomic() && cell.write.is_atomic();
    if (!are_atomic && !block.has_done(cell.write, true, thread)) other = cell.write;
    cell = {now, Access(), nullptr};
  });
  if (other.doer() != Access::nobody) {
    const char* const bytes = static_cast<const char*>(touch.memory);
    suspected_ = {touch, other, {bytes, bytes + touch.bytes}};
  }
  return wrong;
}

std::string Races::judge() {
  const Touch touch = std::exchange(suspected_.touch, Touch());
  const bool is_as_before = memcmp(touch.memory, suspected_.before.data(), touch.bytes) == 0;
  return is_as_before ? std::string() : race("writes", touch, suspected_.other, "set to another value");
}

void Races::exchange(const void* address, Thread& thread) {
  Knowledge& released = released_[address];
  thread.acquired.learn(released);
  released.learn(thread.released);
}

}  // namespace emulation
