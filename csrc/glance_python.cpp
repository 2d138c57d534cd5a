// Looks at tensors as Python has them. To hand two lists of them to torch's dispatcher takes longer than a step of
// small ones. Python calls these functions by ctypes, and holds its lock meanwhile.
#include "common/python_abi.h"
#include "glance.h"

#define MPK_FOR_PYTHON extern "C" __attribute__((visibility("default"))) int

namespace mpk {

static struct {
  decltype(DLPackExchangeAPI::dltensor_from_py_object_no_sync) look;
  PyObject *tensor, *parameter;  // the classes
  PyObject *grad, *is_neg;       // the names
} torch;

static bool refused() {
  PyErr_Clear();
  return false;
}

static bool is_a(PyObject* object, const void* type) {
  PyObject* const its = PyObject_Type(object);
  Py_DecRef(its);
  return its == type;
}

static bool find_dtype(DLDataType type, Dtype* dtype) {
  constexpr uint8_t ieee = 2, bfloat = 4;
  if (type.code == ieee && type.bits == 32)
    *dtype = Dtype::f32;
  else if (type.code == ieee && type.bits == 16)
    *dtype = Dtype::f16;
  else if (type.code == bfloat && type.bits == 16)
    *dtype = Dtype::b16;
  else if (type.code == ieee && type.bits == 64)
    *dtype = Dtype::f64;
  else
    return false;
  return true;
}

static bool is_contiguous(const DLTensor& tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor.ndim; i-- > 0; stride *= tensor.shape[i]) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
  }
  return true;
}

static bool are_alike(const DLTensor& a, const DLTensor& b) {
  bool alike =
      a.ndim == b.ndim && a.device.device_type == b.device.device_type && a.device.device_id == b.device.device_id;
  for (int32_t i = 0; alike && i < a.ndim; ++i) alike = a.shape[i] == b.shape[i];
  return alike;
}

static int64_t size_of(const DLTensor& tensor) {
  int64_t size = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) size *= tensor.shape[i];
  return size;
}

// Whether its memory holds the negatives of its elements: that, the view below doesn't tell.
static bool is_negative(PyObject* tensor) {
  PyObject* const answer = PyObject_CallMethodObjArgs(tensor, torch.is_neg, nullptr);
  if (!answer) return !refused();
  const bool is_true = PyObject_IsTrue(answer) != 0;
  Py_DecRef(answer);
  return is_true;
}

// Of torch's own classes, and with nothing about them that a kernel would not see.
static bool see(PyObject* param, PyObject* grad, Seen* seen) {
  if (!(is_a(param, torch.parameter) || is_a(param, torch.tensor)) || !is_a(grad, torch.tensor)) return false;
  DLTensor its{}, of_grad{};
  if (torch.look(param, &its) != 0 || torch.look(grad, &of_grad) != 0) return refused();
  *seen = {its.data, of_grad.data, size_of(its), {}, {}};
  return find_dtype(its.dtype, &seen->param_dtype) && find_dtype(of_grad.dtype, &seen->grad_dtype) &&
         are_alike(its, of_grad) && is_contiguous(its) && is_contiguous(of_grad) && seen->grad && !is_negative(grad);
}

}  // namespace mpk

// Once, before the others: the capsule with torch's exchange interface, and its two classes. 0: it is of no use.
MPK_FOR_PYTHON mpkernels_glance_with(PyObject* capsule, PyObject* tensor, PyObject* parameter) {
  using mpk::torch;
  const auto* const api = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!api) return mpk::refused();
  if (api->version.major != 1 || !api->dltensor_from_py_object_no_sync) return 0;
  torch = {api->dltensor_from_py_object_no_sync, tensor, parameter, PyUnicode_InternFromString("grad"),
           PyUnicode_InternFromString("is_neg")};
  Py_IncRef(tensor);
  Py_IncRef(parameter);
  return 1;
}

// Whether params, a list, are still the known ones, those in stepped, and no others, have grads, and each such pair can
// be seen. grads is a list as long as params, and gets as many grads as there was need to look at.
MPK_FOR_PYTHON mpkernels_glance(PyObject* params, PyObject* known, PyObject* stepped, PyObject* grads,
                                mpk::Seen* seen) {
  const Py_ssize_t count = PyList_Size(params), rows = PyList_Size(stepped);
  if (count != PyList_Size(known)) return 0;
  Py_ssize_t row = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const param = PyList_GetItem(params, i);
    if (param != PyList_GetItem(known, i)) return 0;
    PyObject* const grad = PyObject_GetAttr(param, mpk::torch.grad);
    if (!grad) return mpk::refused();
    PyList_SetItem(grads, i, grad);
    if (row < rows && PyList_GetItem(stepped, row) == param) {
      if (!mpk::see(param, grad, seen + row++)) return 0;
    } else if (grad != &_Py_NoneStruct) {
      return 0;
    }
  }
  return row == rows;
}

// Whether the dicts that dict holds hold the known objects, in their order, and no others.
MPK_FOR_PYTHON mpkernels_holds(PyObject* dict, PyObject* known) {
  const Py_ssize_t count = PyList_Size(known);
  Py_ssize_t position = 0, i = 0;
  for (PyObject *key, *inner; PyDict_Next(dict, &position, &key, &inner);) {
    if (!mpk::is_a(inner, &PyDict_Type)) continue;
    Py_ssize_t inner_position = 0;
    for (PyObject* value; PyDict_Next(inner, &inner_position, &key, &value); ++i) {
      if (i == count || value != PyList_GetItem(known, i)) return 0;
    }
  }
  return i == count;
}
