// torch as kernels see it: arguments, threads, streams, registration.
#pragma once

#include "common/arguments.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

// CPU: a chunk is 128 KB of fp32, within reach of every L2. A list of small tensors stays on one thread.
inline constexpr int64_t kCpuChunk = 32768;

// Calls body(first, last) for ranges of [0, count) on torch's own threads, with at least grain to each.
template <class Body>
void on_threads(int64_t count, int64_t grain, const Body& body) {
  const auto run = [](int64_t first, int64_t last, void* body) { (*static_cast<const Body*>(body))(first, last); };
  const AOTITorchError status = torch_parallel_for(0, count, grain, run, const_cast<Body*>(&body));
  require(status == 0, "mpkernels", "a thread of torch's failed; what it raised is on stderr");
}

// Calls body(row, span) for each chunk of the table.
template <class Row, class Body>
void parallel_for_chunks(const TableOf<Row>& table, int64_t elements, const Body& body) {
  const int64_t grain = 1 + table.chunks * kCpuChunk / (elements + 1);
  on_threads(table.chunks, grain, [&](int64_t first, int64_t last) {
    Span span = find_span(table.rows, table.count, static_cast<int32_t>(first), table.chunk_size);
    for (; span.chunk < last; span = next_span(table, span)) body(table.rows[span.row], span);
  });
}

#ifdef MPK_CUDA
// CUDA: 128 KB hides a chunk's start-up. Smaller if there would be fewer than 1,024 chunks, larger if more than 16,384.
// Only sizes decide, so that sums come out alike on all chips.
template <class Row>
TableOf<Row> lay_out_on_cuda(std::vector<Row>& rows) {
  constexpr int64_t enough_bytes = 128 << 10, enough_chunks = 1024, many_chunks = 16384;
  int64_t elements = 0, bytes = 0;
  for (const Row& row : rows) elements += row.size, bytes += bytes_read(row);
  int64_t chunk = 4096;
  const auto are_small = [&] { return bytes / (elements / chunk) < enough_bytes; };
  while (elements / chunk >= 2 * enough_chunks && (are_small() || elements / chunk > many_chunks)) chunk *= 2;
  return lay_out(rows, chunk);
}

inline void require_success(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  const bool is_not_for_this = error == cudaErrorInsufficientDriver || error == cudaErrorCallRequiresNewerDriver ||
                               error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion;
  require(false, op,
          std::string("CUDA says ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error) +
              // ops/_devices.py looks for this sentence, and uses other kernels.
              (is_not_for_this ? ". The compiled kernels can't run on this device" : ""));
}

// Makes a tensor's device the current one as long as it lives, and knows torch's current stream there.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor) {
    const int device = tensor.device().second;
    require_success(cudaGetDevice(&previous_), "mpkernels");
    is_elsewhere_ = previous_ != device;
    if (is_elsewhere_) require_success(cudaSetDevice(device), "mpkernels");
    require(aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(device, &stream_) == 0,
            "mpkernels", "torch has no current CUDA stream");
  }
  OnDeviceOf(const OnDeviceOf&) = delete;
  ~OnDeviceOf() {
    if (is_elsewhere_) (void)cudaSetDevice(previous_);  // a destructor can't raise; CUDA's next call will
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

 private:
  int previous_ = 0;
  bool is_elsewhere_ = false;
  void* stream_ = nullptr;
};

// Whether what the stream is given becomes part of a CUDA graph instead of being done.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  require_success(cudaStreamIsCapturing(stream, &status), "mpkernels");
  return status != cudaStreamCaptureStatusNone;
}

// Memory for the rows of a table that is too long for a launch's parameters; else none.
template <class Row>
class RowMemory {
 public:
  RowMemory(const TableOf<Row>& table, const Tensor& on_device_of) {
    if (table.count > kRowsInParameters<Row>)
      memory_ = std::make_unique<Tensor>(on_device_of.scratch(sizeof(Row) * table.count));
  }
  Row* get() const { return memory_ ? memory_->data<Row>() : nullptr; }

 private:
  std::unique_ptr<Tensor> memory_;
};
#endif

inline constexpr uint64_t kTorch2_10 = uint64_t{2} << 56 | uint64_t{10} << 48;  // whose C ABI is used

// A kernel takes the arguments off the stack, which it then owns, and puts the results there.
using Kernel = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

struct Registration {
  Registration(const char* library, const char* dispatch_key, const char* op, Kernel kernel) {
    TorchLibraryHandle handle = nullptr;
    const bool is_registered = aoti_torch_library_init_impl(library, dispatch_key, __FILE__, __LINE__, &handle) == 0 &&
                               torch_library_impl(handle, op, kernel, kTorch2_10) == 0;
    require(is_registered, op, "torch has not taken the kernel");
  }
};

// The schema is declared in Python (mpkernels/ops); a kernel attaches itself to it under its device.
#ifdef MPK_EMULATION
#define MPK_LIBRARY "mpkernels_emulated"
#define MPK_CPU_KERNEL(op, kernel)
#define MPK_CUDA_KERNEL(op, kernel) MPK_REGISTER("CPU", op, kernel)
#else
#ifndef MPK_LIBRARY  // a test's build has another name
#define MPK_LIBRARY "mpkernels"
#endif
#define MPK_CPU_KERNEL(op, kernel) MPK_REGISTER("CPU", op, kernel)
#define MPK_CUDA_KERNEL(op, kernel) MPK_REGISTER("CUDA", op, kernel)
#endif
#define MPK_KERNEL_WITHOUT_TENSORS(op, kernel) MPK_REGISTER("CompositeExplicitAutograd", op, kernel)
#define MPK_REGISTER(dispatch_key, op, kernel) MPK_REGISTER_AS(__COUNTER__, dispatch_key, op, kernel)
#define MPK_REGISTER_AS(number, dispatch_key, op, kernel) MPK_REGISTRATION(number, dispatch_key, op, kernel)
#define MPK_REGISTRATION(number, dispatch_key, op, kernel) \
  static const mpk::Registration registration_##number{MPK_LIBRARY, dispatch_key, op, &kernel};

}  // namespace mpk
