// torch as kernels see it: tensors, lists of them as tables, threads, streams, registration.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "table.h"
#include "torch_abi.h"

#ifdef MPK_CUDA
#include <cuda_runtime.h>
#endif

namespace mpk {

inline void require(bool met, const char* op, const std::string& what) {
  if (!met) throw std::runtime_error(std::string(op) + ": " + what);
}

// Owns one reference to a tensor, as arguments arrive and results leave.
class Tensor {
 public:
  explicit Tensor(StableIValue value) : handle_(reinterpret_cast<AtenTensorHandle>(value)) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor(const Tensor&) = delete;
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  // Uninitialised and contiguous, on the device of this one.
  Tensor new_empty(int64_t ndim, const int64_t* sizes, int32_t dtype) const {
    std::vector<int64_t> strides(ndim);
    for (int64_t i = ndim - 1, stride = 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
    return new_empty(ndim, sizes, strides.data(), dtype);
  }
  Tensor new_empty(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype) const {
    AtenTensorHandle empty = nullptr;
    const AOTITorchError error =
        aoti_torch_empty_strided(ndim, sizes, strides, dtype, device().first, device().second, &empty);
    require(error == 0, "mpkernels", "torch could not allocate a tensor");
    return Tensor(reinterpret_cast<StableIValue>(empty));
  }
  // Bytes on the device of this one, 16-byte aligned.
  Tensor scratch(int64_t bytes) const { return new_empty(1, &bytes, aoti_torch_dtype_uint8()); }
  void copy_from(const Tensor& source) {
    require(aoti_torch_copy_(handle_, source.handle_, 0) == 0, "mpkernels", "torch could not copy a tensor");
  }
  StableIValue release() { return reinterpret_cast<StableIValue>(std::exchange(handle_, nullptr)); }

  int64_t size() const { return get<int64_t>(aoti_torch_get_numel); }
  int64_t ndim() const { return get<int64_t>(aoti_torch_get_dim); }
  const int64_t* sizes() const { return get<int64_t*>(aoti_torch_get_sizes); }
  const int64_t* strides() const { return get<int64_t*>(aoti_torch_get_strides); }
  int32_t dtype() const { return get<int32_t>(aoti_torch_get_dtype); }
  std::pair<int32_t, int32_t> device() const {  // type, index
    return {get<int32_t>(aoti_torch_get_device_type), get<int32_t>(aoti_torch_get_device_index)};
  }
  bool is_strided() const {
    static const int32_t strided = aoti_torch_layout_strided();
    return get<int32_t>(aoti_torch_get_layout) == strided;
  }
  // A single fp32: what scales and flags are.
  bool is_fp32_scalar() const { return is_strided() && dtype() == aoti_torch_dtype_float32() && size() == 1; }
  template <class T = void>
  T* data() const {
    return static_cast<T*>(get<void*>(torch_get_mutable_data_ptr));
  }
  // Does not break torch's copy-on-write sharing, as data() does.
  const void* const_data() const { return get<const void*>(torch_get_const_data_ptr); }

  bool is_contiguous() const { return get<bool>(aoti_torch_is_contiguous); }
  // Whether the elements fill their memory without a gap or an overlap, in whichever order of the dimensions.
  bool is_dense() const {
    if (size() == 0) return true;
    std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
    for (int64_t i = 0; i < ndim(); ++i) {
      if (sizes()[i] > 1) dimensions.emplace_back(strides()[i], sizes()[i]);
    }
    std::sort(dimensions.begin(), dimensions.end());
    int64_t filled = 1;
    for (const auto& [stride, size] : dimensions) {
      if (stride != filled) return false;
      filled *= size;
    }
    return true;
  }
  // Whether the same memory is certain to be seen twice, as in an expanded tensor.
  bool is_expanded() const {
    for (int64_t i = 0; i < ndim(); ++i) {
      if (sizes()[i] > 1 && strides()[i] == 0) return true;
    }
    return false;
  }

 private:
  template <class Value>
  Value get(AOTITorchError (*getter)(AtenTensorHandle, Value*)) const {
    Value value{};
    if (getter(handle_, &value) != 0) require(false, "mpkernels", "torch refused to describe a tensor");
    return value;
  }

  AtenTensorHandle handle_;
};

// Whether element i of a and of b lie equally far into their memory, for every i. The shapes must be the same.
inline bool have_same_layout(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  for (int64_t i = 0; i < a.ndim(); ++i) {
    if (a.sizes()[i] > 1 && a.strides()[i] != b.strides()[i]) return false;
  }
  return true;
}

inline bool have_same_shape(const Tensor& a, const Tensor& b) {
  return a.ndim() == b.ndim() && std::equal(a.sizes(), a.sizes() + a.ndim(), b.sizes());
}

inline bool find_dtype(int32_t torch_dtype, Dtype* dtype) {
  static const int32_t known[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(),
                                  aoti_torch_dtype_float64()};  // in the order of Dtype
  const int32_t* const found = std::find(std::begin(known), std::end(known), torch_dtype);
  *dtype = static_cast<Dtype>(found - known);
  return found != std::end(known);
}

// Numbers the rows' chunks.
template <class Row>
TableOf<Row> lay_out(std::vector<Row>& rows, int64_t chunk_size) {
  int32_t chunks = 0;
  for (Row& row : rows) {
    row.first_chunk = chunks;
    chunks += chunks_of(row.size, chunk_size);
  }
  return {rows.data(), static_cast<int32_t>(rows.size()), chunks, chunk_size};
}

// A Tensor[] argument as a table of flat memory. A tensor that is not dense lends a contiguous copy; return_copies()
// writes such copies back.
class TensorList {
 public:
  explicit TensorList(StableIValue value) {
    const auto list = reinterpret_cast<StableListHandle>(value);
    size_t count = 0;
    torch_list_size(list, &count);
    tensors_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      StableIValue item = 0;
      torch_list_get_item(list, i, &item);
      tensors_.emplace_back(item);
    }
    torch_delete_list(list);
  }

  const Tensor& front() const { return tensors_.front(); }
  const Tensor& operator[](int32_t i) const { return tensors_[i]; }
  int32_t count() const { return static_cast<int32_t>(tensors_.size()); }
  int64_t elements() const { return elements_; }

  // Checks everything before anything is written; op and name are for the message.
  void flatten(const char* op, const char* name, const Tensor& on_device_of, bool will_write) {
    const auto device = on_device_of.device();
    rows_.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor& tensor = tensors_[i];
      Row row{nullptr, tensor.size(), 0, Dtype::f32};
      const char* problem = nullptr;
      if (!tensor.is_strided())
        problem = "is not dense";
      else if (tensor.device() != device)
        problem = "is on another device";
      else if (!find_dtype(tensor.dtype(), &row.dtype))
        problem = "is none of fp16, bf16, fp32, fp64";
      else if (!tensor.is_contiguous() && !tensor.is_dense()) {
        if (will_write && tensor.is_expanded()) problem = "has elements that share memory";
        copies_.emplace_back(i, tensor.new_empty(tensor.ndim(), tensor.sizes(), tensor.dtype()));
      }
      if (problem) require(false, op, std::string(name) + "[" + std::to_string(i) + "] " + problem);
      rows_.push_back(row);
      elements_ += row.size;
    }
    for (auto& [i, copy] : copies_) copy.copy_from(tensors_[i]);
    for (size_t i = 0, copied = 0; i < tensors_.size(); ++i) {
      const bool is_copied = copied < copies_.size() && copies_[copied].first == i;
      const Tensor& flat = is_copied ? copies_[copied++].second : tensors_[i];
      rows_[i].data = will_write ? flat.data() : const_cast<void*>(flat.const_data());
    }
  }

  Table table(int64_t chunk_size) { return lay_out(rows_, chunk_size); }

  void return_copies() {
    for (const auto& [i, copy] : copies_) tensors_[i].copy_from(copy);
  }

 private:
  std::vector<Tensor> tensors_;
  std::vector<std::pair<size_t, Tensor>> copies_;
  std::vector<Row> rows_;
  int64_t elements_ = 0;
};

// Hands out memory in which the elements of several tensors lie in the same order: a tensor's own, or a copy's.
class Lender {
 public:
  void* lend(const Tensor& tensor, const Tensor& like, bool will_write) {
    const bool dense = like.is_contiguous() || like.is_dense();
    if (dense && have_same_layout(tensor, like))
      return will_write ? tensor.data() : const_cast<void*>(tensor.const_data());
    const int64_t* const sizes = like.sizes();
    loans_.push_back({&tensor,
                      dense ? like.new_empty(like.ndim(), sizes, like.strides(), tensor.dtype())
                            : like.new_empty(like.ndim(), sizes, tensor.dtype()),
                      will_write});
    loans_.back().copy.copy_from(tensor);
    return loans_.back().copy.data();
  }
  void return_copies() {
    for (Loan& loan : loans_) {
      if (loan.will_write) const_cast<Tensor*>(loan.original)->copy_from(loan.copy);
    }
  }

 private:
  struct Loan {
    const Tensor* original;
    Tensor copy;
    bool will_write;
  };
  std::vector<Loan> loans_;
};

// Other kinds of argument.
inline std::unique_ptr<Tensor> take_optional(StableIValue value) {
  const std::unique_ptr<StableIValue> inner(reinterpret_cast<StableIValue*>(value));
  return inner ? std::make_unique<Tensor>(*inner) : nullptr;
}

template <class T>
std::vector<T> take_numbers(StableIValue value) {
  const auto list = reinterpret_cast<StableListHandle>(value);
  size_t count = 0;
  torch_list_size(list, &count);
  std::vector<T> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    StableIValue item = 0;
    torch_list_get_item(list, i, &item);
    memcpy(&numbers[i], &item, sizeof(T));
  }
  torch_delete_list(list);
  return numbers;
}

// CPU: a chunk is 128 KB of fp32, within reach of every L2. A list of small tensors stays on one thread.
inline constexpr int64_t kCpuChunk = 32768;

// Calls body(row, span) for each chunk of the table on torch's own threads.
template <class Row, class Body>
void parallel_for_chunks(const TableOf<Row>& table, int64_t elements, const Body& body) {
  struct Context {
    const TableOf<Row>& table;
    const Body& body;
  } context{table, body};
  const auto run = [](int64_t begin, int64_t end, void* opaque) {
    const auto& [table, body] = *static_cast<const Context*>(opaque);
    Span span = find_span(table.rows, table.count, static_cast<int32_t>(begin), table.chunk_size);
    for (; span.chunk < end; span = next_span(table, span)) body(table.rows[span.row], span);
  };
  const int64_t grain = 1 + table.chunks * kCpuChunk / (elements + 1);
  torch_parallel_for(0, table.chunks, grain, run, &context);
}

#ifdef MPK_CUDA
// CUDA: chunks small enough to fill the chip, and few enough that their partial sums cost nothing.
inline int64_t cuda_chunk(int64_t elements) {
  int64_t chunk = 8192;
  while (elements / chunk > 16384) chunk *= 2;
  return chunk;
}

inline void require_success(cudaError_t error, const char* op) {
  if (error != cudaSuccess)
    require(false, op, std::string("CUDA says ") + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Makes a tensor's device the current one as long as it lives, and knows torch's current stream there.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor) {
    require_success(cudaGetDevice(&previous_), "mpkernels");
    require_success(cudaSetDevice(tensor.device().second), "mpkernels");
    require(
        aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(tensor.device().second, &stream_) == 0,
        "mpkernels", "torch has no current CUDA stream");
  }
  OnDeviceOf(const OnDeviceOf&) = delete;
  ~OnDeviceOf() { cudaSetDevice(previous_); }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

 private:
  int previous_ = 0;
  void* stream_ = nullptr;
};
#endif

// A kernel takes the arguments off the stack, which it then owns, and puts the results there.
using Kernel = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

struct Registration {
  Registration(const char* library, const char* dispatch_key, const char* op, Kernel kernel) {
    constexpr uint64_t torch_2_10 = uint64_t{2} << 56 | uint64_t{10} << 48;
    TorchLibraryHandle handle = nullptr;
    aoti_torch_library_init_impl(library, dispatch_key, __FILE__, __LINE__, &handle);
    torch_library_impl(handle, op, kernel, torch_2_10);
  }
};

// The schema is declared in Python (mpkernels/ops); a kernel attaches itself to it under its device.
#ifdef MPK_EMULATION
#define MPK_CPU_KERNEL(op, kernel)
#define MPK_CUDA_KERNEL(op, kernel) \
  static const mpk::Registration kernel##_here{"mpkernels_emulated", "CPU", op, &kernel};
#else
#define MPK_CPU_KERNEL(op, kernel) static const mpk::Registration kernel##_here{"mpkernels", "CPU", op, &kernel};
#define MPK_CUDA_KERNEL(op, kernel) static const mpk::Registration kernel##_here{"mpkernels", "CUDA", op, &kernel};
#endif

}  // namespace mpk
