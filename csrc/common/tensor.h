// A tensor, through torch's stable ABI.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/huge_pages.h"
#include "common/numeric.h"
#include "common/torch_abi.h"

namespace mpk {

inline void require(bool met, const char* op, const char* what) {
  if (!met) throw std::runtime_error(std::string(op) + ": " + what);
}
inline void require(bool met, const char* op, const std::string& what) { require(met, op, what.c_str()); }

// Owns one reference to a tensor, as torch passes arguments and takes results.
class Tensor {
 public:
  explicit Tensor(StableIValue value) : handle_(reinterpret_cast<AtenTensorHandle>(value)) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor(const Tensor&) = delete;
  ~Tensor() {
    if (handle_) (void)aoti_torch_delete_tensor_object(handle_);  // a destructor can't raise, and a delete can't fail
  }

  // Returns an uninitialised, contiguous tensor on this one's device.
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
    Tensor result(reinterpret_cast<StableIValue>(empty));
    constexpr int64_t kMappedAnew = 32 << 20;  // malloc maps so many bytes anew each time, but keeps smaller blocks
    const int64_t bytes = result.size() * aoti_torch_dtype_element_size(dtype);
    if (bytes >= kMappedAnew && result.device().first == aoti_torch_device_type_cpu())
      ask_for_huge_pages(result.data(), bytes);
    return result;
  }
  // Returns a view of this tensor's memory, `offset` elements behind its first one. torch doesn't look at the address,
  // which may not be valid yet: memory that cudaMallocAsync gives a CUDA graph is there once the graph runs.
  Tensor view(int64_t offset, int64_t ndim, const int64_t* sizes, const int64_t* strides) const {
    AtenTensorHandle view = nullptr;
    const AOTITorchError error = aoti_torch__reinterpret_tensor(handle_, ndim, sizes, strides, offset, &view);
    require(error == 0, "mpkernels", "torch could not make a view");
    return Tensor(reinterpret_cast<StableIValue>(view));
  }
  // Returns a view of CPU memory, whose owner must outlive the view.
  static Tensor over(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                     std::pair<int32_t, int32_t> device) {
    AtenTensorHandle view = nullptr;
    const AOTITorchError error =
        aoti_torch_create_tensor_from_blob(data, ndim, sizes, strides, 0, dtype, device.first, device.second, &view);
    require(error == 0, "mpkernels", "torch could not make a view");
    return Tensor(reinterpret_cast<StableIValue>(view));
  }
  // Returns uninitialised bytes on this tensor's device, aligned to 16.
  Tensor scratch(int64_t bytes) const { return new_empty(1, &bytes, aoti_torch_dtype_uint8()); }
  void copy_from(const Tensor& source) {
    require(aoti_torch_copy_(handle_, source.handle_, 0) == 0, "mpkernels", "torch could not copy a tensor");
  }
  AtenTensorHandle handle() const { return handle_; }
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
  // Whether this is a single fp32, as scales and flags are.
  bool is_fp32_scalar() const { return is_strided() && dtype() == aoti_torch_dtype_float32() && size() == 1; }
  template <class T = void>
  T* data() const {
    return static_cast<T*>(get<void*>(torch_get_mutable_data_ptr));
  }
  // Unlike data(), this keeps torch's copy-on-write sharing.
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
  // Whether elements are certain to share memory, as in an expanded tensor.
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

// Whether each element lies at the same offset in a as in b. The shapes must be the same.
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

}  // namespace mpk
