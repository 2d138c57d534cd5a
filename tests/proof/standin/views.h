// A CUDA tensor and the arguments of an op, as torch's CPU and Meta kernels see them.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

namespace standin {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// While it lives, grad mode, autocast and modes of the calling thread don't apply: they aren't for the device's work.
struct OnDevice {
  at::NoGradGuard no_grad;
  c10::impl::ForceDispatchKeyGuard below{
      DispatchKeySet(DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                          DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
                          DispatchKey::Functionalize})};
};

inline void keep_wrapped(const at::Tensor& from,
                         const at::Tensor& to) {  // a Python number, which gives way in promotion
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// CPU tensors over the memory of CUDA tensors, which own it. Tensors that share memory share it here, too.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    c10::Storage& shared = storages_[storage.unsafeGetStorageImpl()];
    if (!shared) {
      const c10::Device cpu(c10::kCPU);
      shared = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), {storage.mutable_data(), cpu});
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(shared), DispatchKeySet(DispatchKey::CPU),
                                                          tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    keep_wrapped(tensor, alias);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    return alias;
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

inline at::Tensor copy_of(const at::Tensor& tensor) {  // of the host's, which may change it after the call
  const OnDevice here;
  at::Tensor copy = tensor.clone();
  keep_wrapped(tensor, copy);
  return copy;
}

inline at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.is_cuda() && tensor.dim() == 0) return tensor;  // a number
  return at::empty_strided(tensor.sizes(), tensor.strides(), at::device(c10::kMeta).dtype(tensor.dtype()));
}

// Returns the value with each of its tensors replaced.
template <class Replace>
IValue mapped(const IValue& value, const Replace& replace) {
  const auto each = [&](const at::Tensor& it) { return it.defined() ? replace(it) : it; };
  if (value.isTensor()) return each(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& it : value.toTensorVector()) list.push_back(each(it));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& it : value.toOptionalTensorVector())
      list.push_back(it ? std::optional<at::Tensor>(each(*it)) : std::nullopt);
    return list;
  }
  return value;
}
template <class Replace>
Stack mapped(const Stack& values, c10::DeviceType type, const Replace& replace) {
  Stack all;
  for (const IValue& it : values) all.push_back(it.isDevice() ? IValue(c10::Device(type)) : mapped(it, replace));
  return all;
}

}  // namespace standin
