#pragma once

#include <cstddef>
#include <vector>

namespace emulation {

// The kernels' __shared__ variables are this library's thread-local storage, and so are the host's thread-local
// variables: those get their values back when the launch is over.
class SharedMemory {
 public:
  explicit SharedMemory(size_t dynamic_bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  void poison();  // a block must not read what it has not written: all ones is NaN, and -1

 private:
  char* begin_;
  std::vector<char> host_values_;
};

}  // namespace emulation
