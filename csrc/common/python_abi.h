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

extern "C" {
PyObject* PyObject_Type(PyObject* object);
PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
PyObject* PyObject_CallMethodObjArgs(PyObject* object, PyObject* name, ...);
int PyObject_IsTrue(PyObject* object);
Py_ssize_t PyList_Size(PyObject* list);
PyObject* PyList_GetItem(PyObject* list, Py_ssize_t index);
int PyList_SetItem(PyObject* list, Py_ssize_t index, PyObject* item);
int PyDict_Next(PyObject* dict, Py_ssize_t* position, PyObject** key, PyObject** value);
PyObject* PyUnicode_InternFromString(const char* text);
void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
void PyErr_Clear();
void Py_IncRef(PyObject* object);
void Py_DecRef(PyObject* object);
extern PyTypeObject PyDict_Type;
extern PyObject _Py_NoneStruct;
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
