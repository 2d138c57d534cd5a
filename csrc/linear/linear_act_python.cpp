// linear_act as Python calls it for small layers, past torch's dispatcher, which would take longer than all that is
// done here.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "common/python_tensor.h"
#include "common/torch_abi.h"
#include "linear/linear_act.h"

namespace mpk {

struct Call {
  static constexpr int32_t kMostDims = 16;

  char activation[16];
  DLDevice device;
  DLDataType dtypes[2];
  int64_t length, has_bias, trains, transposed;
  int64_t shape_of_weight[2], shape_of_x[kMostDims];
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

static bool fits(const DLTensor& bias, const DLTensor& weight) {
  return bias.ndim == 1 && bias.shape[0] == weight.shape[0] &&
         memcmp(&bias.dtype, &weight.dtype, sizeof bias.dtype) == 0 && are_on_one_device(bias, weight);
}

// As weight.t() is of a contiguous weight. Strides say nothing of a dimension with one element, or none.
static bool is_transposed(const DLTensor& tensor) {
  return tensor.ndim > 0 && tensor.shape[tensor.ndim - 1] > 1 && tensor.strides[tensor.ndim - 1] != 1;
}

// What the choice between kernels depends on in a call of linear_act(x, weight, bias, activation), as bytes, to be
// found in a dict; None: it is no ordinary layer's call. Raises what torch does of a tensor that it can't show.
static PyObject* describe(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  PyObject *const x = arguments[0], *const weight = arguments[1], *const bias = arguments[2];
  const bool has_bias = bias != &_Py_NoneStruct;
  if (!is_a(x, torch.tensor) || !is_plain(weight) || (has_bias && !is_plain(bias))) return none();
  if (!is_a(arguments[3], &PyUnicode_Type)) return none();
  Py_ssize_t length = 0;
  const char* const activation = PyUnicode_AsUTF8AndSize(arguments[3], &length);
  DLTensor of_x{}, of_weight{}, of_bias{};
  if (!activation || torch.look(x, &of_x) != 0 || torch.look(weight, &of_weight) != 0) return nullptr;
  if (has_bias && torch.look(bias, &of_bias) != 0) return nullptr;
  if (length > Py_ssize_t{sizeof Call::activation} || of_x.ndim > Call::kMostDims) return none();
  if (of_weight.ndim != 2 || !are_on_one_device(of_x, of_weight) || (has_bias && !fits(of_bias, of_weight)))
    return none();
  const bool trains = aoti_torch_grad_mode_is_enabled() &&
                      (requires_grad(weight) || requires_grad(x) || (has_bias && requires_grad(bias)));
  const int64_t transposed = (is_transposed(of_x) ? 1 : 0) + (is_transposed(of_weight) ? 2 : 0);
  Call call{{}, of_x.device, {of_x.dtype, of_weight.dtype}, length, has_bias, trains, transposed, {}, {}};
  memcpy(call.activation, activation, length);
  memcpy(call.shape_of_weight, of_weight.shape, sizeof call.shape_of_weight);
  memcpy(call.shape_of_x, of_x.shape, of_x.ndim * sizeof(int64_t));
  return PyBytes_FromStringAndSize(reinterpret_cast<char*>(&call),
                                   offsetof(Call, shape_of_x) + of_x.ndim * sizeof(int64_t));
}

static bool find_activation(PyObject* name, Activation* activation) {
  Py_ssize_t length = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name, &length);
  if (!text) PyErr_Clear();
  const std::string_view sought(text ? text : "", length);
  const auto found = std::find(std::begin(kActivationNames), std::end(kActivationNames), sought);
  *activation = static_cast<Activation>(found - std::begin(kActivationNames));
  return found != std::end(kActivationNames);
}

// activate(z, activation): f(z) where z is. 0 where torch must do it: on another device, in fp64, where there is
// more of it than for one thread.
static PyObject* activate(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  constexpr int64_t kMost = 32768;  // what torch gives to one thread, too
  constexpr int32_t kCpu = 1;
  DLTensor z{};
  Activation activation{};
  Dtype dtype{};
  const bool can = is_a(arguments[0], torch.tensor) && look(arguments[0], &z) && z.device.device_type == kCpu &&
                   is_contiguous(z) && size_of(z) <= kMost && find_dtype(z.dtype, &dtype) && dtype != Dtype::f64 &&
                   find_activation(arguments[1], &activation);
  if (can) MPK_BEST(linear_act_rows)({activation, dtype, dtype, z.data, nullptr, z.data, nullptr}, 1, size_of(z));
  return PyBool_FromLong(can);
}

static PyMethodDef describe_method{"describe", describe, MPK_FASTCALL, nullptr};
static PyMethodDef activate_method{"activate", activate, MPK_FASTCALL, nullptr};

}  // namespace mpk

// The functions, as Python calls its own: ctypes takes longer than all that they do.
MPK_FOR_PYTHON PyObject* mpkernels_describe() {
  return PyCMethod_New(&mpk::describe_method, nullptr, nullptr, nullptr);
}
MPK_FOR_PYTHON PyObject* mpkernels_activate() {
  return PyCMethod_New(&mpk::activate_method, nullptr, nullptr, nullptr);
}
