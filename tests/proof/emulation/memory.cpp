// Sees each access of the kernels: -fsanitize=thread makes the compiler call these functions, in place of libtsan's,
// before every load and store.
#include <cstring>

#include "scheduler.h"

namespace emulation {
namespace {

enum class Kind { read, write };

// Whether other threads may access the memory: it is neither on the thread's stack nor a built-in variable.
bool is_watched(const Thread& self, const void* memory) {
  const auto offset = reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(&built);
  return !self.fiber.owns(memory) && offset >= sizeof(built);
}

void touch(Kind kind, const void* memory, size_t bytes, Path path, const void* code) {
  const Thread* const self = this_thread();
  if (!self || !is_watched(*self, memory)) return;
  const Touch it{memory, bytes, space_of(memory), path, code};
  const Block& block = resident->block;
  const std::string wrong = kind == Kind::read ? races.read(it, block, *self) : races.write(it, block, *self);
  if (!wrong.empty()) fail(wrong);
}

}  // namespace

void fence() {
  pause();
  resident->block.fence(*running);
}

void begin_atomic(void* address, size_t bytes) {
  pause();
  touch(Kind::write, address, bytes, Path::atomic, __builtin_return_address(0));
  races.exchange(address, *running);
}

void load_past_l1(void* to, const void* from, size_t bytes) {
  touch(Kind::read, from, bytes, Path::past_l1, __builtin_return_address(0));
  memcpy(to, from, bytes);
}

void copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

}  // namespace emulation

using emulation::Kind;
using emulation::Path;

extern "C" {

#define EMULATION_ACCESS(kind, path, name, bytes) \
  void name(void* memory) { emulation::touch(kind, memory, bytes, path, __builtin_return_address(0)); }
#define EMULATION_ACCESSES(bytes)                                                       \
  EMULATION_ACCESS(Kind::read, Path::through_l1, __tsan_read##bytes, bytes)             \
  EMULATION_ACCESS(Kind::read, Path::through_l1, __tsan_unaligned_read##bytes, bytes)   \
  EMULATION_ACCESS(Kind::read, Path::past_l1, __tsan_volatile_read##bytes, bytes)       \
  EMULATION_ACCESS(Kind::write, Path::through_l1, __tsan_write##bytes, bytes)           \
  EMULATION_ACCESS(Kind::write, Path::through_l1, __tsan_unaligned_write##bytes, bytes) \
  EMULATION_ACCESS(Kind::write, Path::through_l1, __tsan_volatile_write##bytes, bytes)
EMULATION_ACCESSES(1)
EMULATION_ACCESSES(2)
EMULATION_ACCESSES(4)
EMULATION_ACCESSES(8)
EMULATION_ACCESSES(16)

void __tsan_read_range(void* memory, size_t bytes) {
  emulation::touch(Kind::read, memory, bytes, Path::through_l1, __builtin_return_address(0));
}
void __tsan_write_range(void* memory, size_t bytes) {
  emulation::touch(Kind::write, memory, bytes, Path::through_l1, __builtin_return_address(0));
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
