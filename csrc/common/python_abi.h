// The few functions of Python's stable ABI that are called, and what of DLPack's exchange interface is read (version
// 1).
#pragma once

#include <cstddef>
#include <cstdint>

struct _object;
using PyObject = _object;
struct _typeobject;
using PyTypeObject = _typeobject;
using Py_ssize_t = ptrdiff_t;
struct PyMethodDef;

// Weak: where there is no Python, the kernels are still of use.
#define MPK_WEAK __attribute__((weak))
extern "C" {
MPK_WEAK PyObject* PyObject_Type(PyObject* object);
MPK_WEAK PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
MPK_WEAK PyObject* PyObject_CallMethodObjArgs(PyObject* object, PyObject* name, ...);
MPK_WEAK int PyObject_IsTrue(PyObject* object);
MPK_WEAK Py_ssize_t PyList_Size(PyObject* list);
MPK_WEAK PyObject* PyList_GetItem(PyObject* list, Py_ssize_t index);
MPK_WEAK int PyList_SetItem(PyObject* list, Py_ssize_t index, PyObject* item);
MPK_WEAK int PyDict_Next(PyObject* dict, Py_ssize_t* position, PyObject** key, PyObject** value);
MPK_WEAK PyObject* PyUnicode_InternFromString(const char* text);
MPK_WEAK const char* PyUnicode_AsUTF8AndSize(PyObject* text, Py_ssize_t* size);
MPK_WEAK PyObject* PyBytes_FromStringAndSize(const char* bytes, Py_ssize_t size);
MPK_WEAK PyObject* PyCMethod_New(PyMethodDef* method, PyObject* self, PyObject* module, PyTypeObject* its_class);
MPK_WEAK PyObject* PyBool_FromLong(long value);
MPK_WEAK void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
MPK_WEAK void PyErr_Clear();
MPK_WEAK void Py_IncRef(PyObject* object);
MPK_WEAK void Py_DecRef(PyObject* object);
extern MPK_WEAK PyTypeObject PyDict_Type;
extern MPK_WEAK PyTypeObject PyUnicode_Type;
extern MPK_WEAK PyObject _Py_NoneStruct;
}

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

enum DLDataTypeCode : uint8_t { kDLFloat = 2, kDLBfloat = 4 };

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackVersion {
  uint32_t major, minor;
};

struct DLPackExchangeAPI {
  DLPackVersion version;
  DLPackExchangeAPI* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
};

constexpr int MPK_FASTCALL = 0x80;

struct PyMethodDef {
  const char* ml_name;
  PyObject* (*ml_meth)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);  // as METH_FASTCALL has it
  int ml_flags;
  const char* ml_doc;
};
