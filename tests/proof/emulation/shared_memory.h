#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

// The kernels' __shared__ variables are this library's thread-local storage, and so are the host's thread-local
// variables: those get their values back when the launch is over. Each block finds its own values there in its turn.
class SharedMemory {
 public:
  explicit SharedMemory(unsigned blocks);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  void enter(unsigned block);  // keeps the values of the block before
  void poison();               // a block must not read what it has not written: all ones is NaN, and -1
  bool contains(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin_) < host_values_.size();
  }

 private:
  char* begin_;
  std::vector<char> host_values_;
  std::vector<std::vector<char>> values_;  // by block
  unsigned block_ = 0;
};

}  // namespace emulation
