#include "fiber.h"

#include <sys/mman.h>

#include <new>

namespace emulation {
namespace {

Fiber* active;
void* resumer[5];

}  // namespace

Fiber::Fiber(void (*body)()) : body_(body) {
  stack_ = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(stack_, kGuard, PROT_NONE);
  getcontext(&start_);
  start_.uc_stack.ss_sp = stack_;
  start_.uc_stack.ss_size = kStack;
  makecontext(&start_, &Fiber::main, 0);
}

Fiber::~Fiber() { munmap(stack_, kStack); }

void Fiber::main() {
  for (;;) {
    active->body_();
    active->suspend();
  }
}

void Fiber::suspend() {
  if (__builtin_setjmp(here_) == 0) __builtin_longjmp(resumer, 1);
}

void Fiber::resume() {
  active = this;
  if (__builtin_setjmp(resumer) != 0) return;
  if (started_) __builtin_longjmp(here_, 1);
  started_ = true;
  setcontext(&start_);
}

}  // namespace emulation
