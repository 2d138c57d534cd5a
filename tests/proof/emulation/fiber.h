// A CUDA thread on the CPU. It has its own stack, which the compiler's longjmp enters and leaves. swapcontext would do,
// but costs two system calls a switch, and kernels switch millions of times.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>

namespace emulation {

class Fiber {
 public:
  explicit Fiber(void (*body)());  // runs anew when resumed after it has returned
  ~Fiber();
  Fiber(const Fiber&) = delete;

  void resume();                          // returns when the fiber suspends or its body returns
  void suspend();                         // to be called on the fiber itself
  bool owns(const void* address) const {  // on its stack
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(stack_) < kStack;
  }

  // A kernel may take 32 KB of parameters, which g++ copies to the stack. The guard turns an overflow into a crash.
  static constexpr size_t kStack = 256 << 10, kGuard = 64 << 10;

 private:
  static void main();

  void (*body_)();
  void* stack_;
  ucontext_t start_;
  void* here_[5];
  bool started_ = false;
};

}  // namespace emulation
