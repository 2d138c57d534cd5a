// Looks at tensors as Python has them. To hand two lists of them to torch's dispatcher takes longer than a step of
// small ones. Python calls these functions by ctypes, and holds its lock meanwhile.
#include <cstring>
#include <type_traits>

#include "common/python_abi.h"
#include "common/torch_abi.h"
#include "glance.h"

#define MPK_FOR_PYTHON extern "C" __attribute__((visibility("default")))

namespace mpk {

static struct {
  decltype(DLPackExchangeAPI::dltensor_from_py_object_no_sync) look;
  PyObject *tensor, *parameter;             // the classes
  PyObject *grad, *is_neg, *requires_grad;  // the names
} torch;

static bool is_a(PyObject* object, const void* type) {
  PyObject* const its = PyObject_Type(object);
  Py_DecRef(its);
  return its == type;
}

static bool find_dtype(DLDataType type, Dtype* dtype) {
  constexpr DLDataType known[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 64, 1}};
  for (int i = 0; i < 4; ++i) {  // in the order of Dtype
    if (type.code != known[i].code || type.bits != known[i].bits) continue;
    *dtype = static_cast<Dtype>(i);
    return true;
  }
  return false;
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

static bool look(PyObject* tensor, DLTensor* found) {
  if (torch.look(tensor, found) == 0) return true;
  PyErr_Clear();  // it has no memory, say
  return false;
}

// Whether its memory holds its elements and not their negatives: that, a look doesn't tell.
static bool is_positive(PyObject* tensor) {
  PyObject* const answer = PyObject_CallMethodObjArgs(tensor, torch.is_neg, nullptr);
  if (!answer) return false;
  const bool is_false = PyObject_IsTrue(answer) == 0;
  Py_DecRef(answer);
  return is_false;
}

// Of torch's own classes, and with nothing about them that a kernel would not see.
static bool see(PyObject* param, PyObject* grad, Seen* seen) {
  if (!(is_a(param, torch.parameter) || is_a(param, torch.tensor)) || !is_a(grad, torch.tensor)) return false;
  DLTensor its{}, of_grad{};
  if (!look(param, &its) || !look(grad, &of_grad)) return false;
  *seen = {its.data, of_grad.data, size_of(its), {}, {}};
  return find_dtype(its.dtype, &seen->param_dtype) && find_dtype(of_grad.dtype, &seen->grad_dtype) &&
         are_alike(its, of_grad) && is_contiguous(its) && is_contiguous(of_grad) && seen->grad && is_positive(param) &&
         is_positive(grad);
}

struct Call {
  char activation[16];
  DLDevice device;
  DLDataType dtypes[2];
  int64_t length, ndim_of_x, has_bias, trains;
  int64_t sizes[16];
};
static_assert(std::has_unique_object_representations_v<Call>);  // no padding, which would hold anything

static bool requires_grad(PyObject* tensor) {
  PyObject* const answer = PyObject_GetAttr(tensor, torch.requires_grad);
  if (!answer) PyErr_Clear();
  const bool is_true = answer && PyObject_IsTrue(answer) == 1;
  Py_DecRef(answer);
  return is_true;
}

static PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

// What the choice between kernels depends on in a call of linear_act(x, weight, bias, activation), as bytes, to be
// found in a dict; None: it is no ordinary layer's call. Raises what torch does of a tensor that it can't show.
static PyObject* describe(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PyObject *const x = arguments[0], *const weight = arguments[1], *const bias = arguments[2];
  const bool has_bias = bias != &_Py_NoneStruct;
  if (!is_a(x, torch.tensor) || !is_a(weight, torch.parameter)) return none();
  if ((has_bias && !is_a(bias, torch.parameter)) || !is_a(arguments[3], &PyUnicode_Type)) return none();
  Py_ssize_t length = 0;
  const char* const activation = PyUnicode_AsUTF8AndSize(arguments[3], &length);
  DLTensor seen[2]{};
  if (!activation || torch.look(x, &seen[0]) != 0 || torch.look(weight, &seen[1]) != 0) return nullptr;
  if (length > Py_ssize_t{sizeof Call::activation} || seen[0].ndim + seen[1].ndim > 16) return none();
  const bool trains = aoti_torch_grad_mode_is_enabled() &&
                      (requires_grad(weight) || requires_grad(x) || (has_bias && requires_grad(bias)));
  const auto& [of_x, of_weight] = seen;
  Call call{{}, of_x.device, {of_x.dtype, of_weight.dtype}, length, of_x.ndim, has_bias, trains, {}};
  memcpy(call.activation, activation, length);
  int64_t* end = call.sizes;
  for (const DLTensor& each : seen) {
    for (int32_t i = 0; i < each.ndim; ++i) *end++ = each.shape[i];
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<char*>(&call),
                                   reinterpret_cast<char*>(end) - reinterpret_cast<char*>(&call));
}

static PyMethodDef describe_method{"describe", describe, MPK_FASTCALL, nullptr};

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

// The function, as Python calls its own: ctypes takes longer than all that it does.
MPK_FOR_PYTHON PyObject* mpkernels_describe() {
  return PyCMethod_New(&mpk::describe_method, nullptr, nullptr, nullptr);
}
