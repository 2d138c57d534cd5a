// What Python's tensors show of themselves, through torch's exchange interface, to C++ that Python calls.
#pragma once

#include "common/numeric.h"
#include "common/python_abi.h"

#define MPK_FOR_PYTHON extern "C" __attribute__((visibility("default")))

namespace mpk {

// Known once mpkernels_glance_with was called.
inline struct TorchInPython {
  decltype(DLPackExchangeAPI::dltensor_from_py_object_no_sync) look;
  PyObject *tensor, *parameter;             // the classes
  PyObject *grad, *is_neg, *requires_grad;  // the names
} torch;

inline bool is_a(PyObject* object, const void* type) {
  PyObject* const its = PyObject_Type(object);
  Py_DecRef(its);
  return its == type;
}

// Of torch's own classes.
inline bool is_plain(PyObject* object) { return is_a(object, torch.parameter) || is_a(object, torch.tensor); }

inline bool find_dtype(DLDataType type, Dtype* dtype) {
  constexpr DLDataType known[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 64, 1}};
  for (int i = 0; i < 4; ++i) {  // in the order of Dtype
    if (type.code != known[i].code || type.bits != known[i].bits) continue;
    *dtype = static_cast<Dtype>(i);
    return true;
  }
  return false;
}

inline bool is_contiguous(const DLTensor& tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor.ndim; i-- > 0; stride *= tensor.shape[i]) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
  }
  return true;
}

inline bool are_on_one_device(const DLTensor& a, const DLTensor& b) {
  return a.device.device_type == b.device.device_type && a.device.device_id == b.device.device_id;
}

inline int64_t size_of(const DLTensor& tensor) {
  int64_t size = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) size *= tensor.shape[i];
  return size;
}

inline bool look(PyObject* tensor, DLTensor* found) {
  if (torch.look(tensor, found) == 0) return true;
  PyErr_Clear();  // it has no memory, say
  return false;
}

}  // namespace mpk
