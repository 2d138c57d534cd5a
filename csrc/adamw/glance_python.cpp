// Looks at tensors as Python has them. To hand two lists of them to torch's dispatcher takes longer than a step of
// small ones. Python calls these functions by ctypes, and holds its lock meanwhile.
#include "common/python_tensor.h"
#include "adamw/glance.h"

namespace mpk {

static bool are_alike(const DLTensor& a, const DLTensor& b) {
  bool alike = a.ndim == b.ndim && are_on_one_device(a, b);
  for (int32_t i = 0; alike && i < a.ndim; ++i) alike = a.shape[i] == b.shape[i];
  return alike;
}

// Whether its memory holds its elements and not their negatives: that, a look doesn't tell.
static bool is_positive(PyObject* tensor) {
  PyObject* const answer = PyObject_CallMethodObjArgs(tensor, torch.is_neg, nullptr);
  if (!answer) return false;
  const bool is_false = PyObject_IsTrue(answer) == 0;
  Py_DecRef(answer);
  return is_false;
}

// With nothing about them that a kernel would not see.
static bool see(PyObject* param, PyObject* grad, Seen* seen) {
  if (!is_plain(param) || !is_a(grad, torch.tensor)) return false;
  DLTensor its{}, of_grad{};
  if (!look(param, &its) || !look(grad, &of_grad)) return false;
  *seen = {its.data, of_grad.data, size_of(its), {}, {}};
  return find_dtype(its.dtype, &seen->param_dtype) && find_dtype(of_grad.dtype, &seen->grad_dtype) &&
         are_alike(its, of_grad) && is_contiguous(its) && is_contiguous(of_grad) && seen->grad && is_positive(param) &&
         is_positive(grad);
}

}  // namespace mpk

// What Python raises meanwhile, it finds when these return.

// Once, before those that look at tensors: the capsule with torch's exchange interface, and its two classes. 0: it is
// of no use.
MPK_FOR_PYTHON int mpkernels_glance_with(PyObject* capsule, PyObject* tensor, PyObject* parameter) {
  using mpk::torch;
  const auto* const api = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!api) {
    PyErr_Clear();
    return 0;
  }
  if (api->version.major != 1 || !api->dltensor_from_py_object_no_sync) return 0;
  torch = {api->dltensor_from_py_object_no_sync,
           tensor,
           parameter,
           PyUnicode_InternFromString("grad"),
           PyUnicode_InternFromString("is_neg"),
           PyUnicode_InternFromString("requires_grad")};
  Py_IncRef(tensor);
  Py_IncRef(parameter);
  return 1;
}

// Whether params, a list, are still the known ones, those in stepped, and no others, have grads, and each such pair can
// be seen. grads is a list as long as params, and gets as many grads as there was need to look at.
MPK_FOR_PYTHON int mpkernels_glance(PyObject* params, PyObject* known, PyObject* stepped, PyObject* grads,
                                    mpk::Seen* seen) {
  const Py_ssize_t count = PyList_Size(params), rows = PyList_Size(stepped);
  if (count != PyList_Size(known)) return 0;
  Py_ssize_t row = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const param = PyList_GetItem(params, i);
    if (param != PyList_GetItem(known, i)) return 0;
    PyObject* const grad = PyObject_GetAttr(param, mpk::torch.grad);
    if (!grad) return 0;
    PyList_SetItem(grads, i, grad);
    if (row < rows && PyList_GetItem(stepped, row) == param) {
      if (!mpk::see(param, grad, seen + row++)) return 0;
    } else if (grad != &_Py_NoneStruct) {
      return 0;
    }
  }
  return row == rows;
}

// Whether the keys of dict whose values are dicts, each followed by what that holds, are the known objects.
MPK_FOR_PYTHON int mpkernels_holds(PyObject* dict, PyObject* known) {
  const Py_ssize_t count = PyList_Size(known);
  Py_ssize_t position = 0, i = 0;
  const auto is_next = [&](PyObject* object) { return i < count && object == PyList_GetItem(known, i++); };
  for (PyObject *key, *inner; PyDict_Next(dict, &position, &key, &inner);) {
    if (!mpk::is_a(inner, &PyDict_Type)) continue;
    if (!is_next(key)) return 0;
    Py_ssize_t inner_position = 0;
    for (PyObject *name, *value; PyDict_Next(inner, &inner_position, &name, &value);) {
      if (!is_next(value)) return 0;
    }
  }
  return i == count;
}
