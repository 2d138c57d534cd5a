"""csrc/common/torch_abi.h declares torch's C functions by hand, python_abi.h Python's.

A compiler that sees their own declarations beside ours refuses any that differ.
"""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from tests import ROOT

CSRC = ROOT / "csrc"
OURS = CSRC / "common" / "torch_abi.h"
TORCH = Path(torch.__file__).parent
CPU = "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>\n"


def complaints_beside_torch(ours):
    source = f"#define USE_CUDA\n#include <torch/csrc/stable/c/shim.h>\n{CPU}{ours}\n"
    compiler = shutil.which("c++") or shutil.which("g++")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{TORCH / 'include'}", "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr


def test_our_declarations_are_torchs():
    assert "error" not in complaints_beside_torch(OURS.read_text())


def test_a_wrong_declaration_would_be_refused():
    wrong = OURS.read_text().replace(
        "aoti_torch_get_numel(AtenTensorHandle tensor,", "aoti_torch_get_numel(int tensor,"
    )
    assert "error" in complaints_beside_torch(wrong)


def test_torch_declares_every_function_that_we_do():
    """A misspelt one would be taken for a new function, and be missing when the library is loaded."""
    inductor = TORCH / "include/torch/csrc/inductor/aoti_torch"
    headers = [TORCH / "include/torch/csrc/stable/c/shim.h", inductor / "c/shim.h", inductor / "generated/c_shim_cpu.h"]
    known = " ".join(header.read_text() for header in headers)
    declared = re.findall(r"\b((?:aoti_)?torch_\w+)\(", OURS.read_text())
    assert len(declared) > 20
    assert [name for name in declared if not re.search(rf"\b{name}\(", known)] == []


PYTHON_ABI = CSRC / "common" / "python_abi.h"
PYTHON_H = Path(sysconfig.get_paths()["include"]) / "Python.h"
DLPACK = ["DLDevice", "DLDataType", "DLTensor", "DLPackVersion"]


def complaints_beside_python(ours):
    """Functions must be declared alike, and each field that we name lie where DLPack has it."""
    functions, structs = ours.split("struct DLDevice", 1)
    source = (
        f"#include <Python.h>\n#include <ATen/dlpack.h>\n{functions}\nnamespace ours {{ struct DLDevice{structs} }}\n"
    )
    for name in DLPACK:
        source += f'static_assert(sizeof(ours::{name}) == sizeof({name}), "{name}");\n'
    for field in ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset"):
        source += f'static_assert(offsetof(ours::DLTensor, {field}) == offsetof(DLTensor, {field}), "{field}");\n'
    look = "dltensor_from_py_object_no_sync"
    source += f"static_assert(offsetof(ours::DLPackExchangeAPI, {look}) == offsetof(DLPackExchangeAPI, {look}));\n"
    source += "static_assert(kDLFloat == int{ours::kDLFloat} && kDLBfloat == int{ours::kDLBfloat});\n"
    source += (
        "static_assert(sizeof(ours::PyMethodDef) == sizeof(PyMethodDef) && METH_FASTCALL == ours::MPK_FASTCALL);\n"
    )
    for field in ("ml_name", "ml_meth", "ml_flags", "ml_doc"):
        source += f"static_assert(offsetof(ours::PyMethodDef, {field}) == offsetof(PyMethodDef, {field}));\n"
    source += "static_assert(DLPACK_MAJOR_VERSION == 1);\n"
    compiler = shutil.which("c++") or shutil.which("g++")
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{PYTHON_H.parent}", f"-I{TORCH / 'include'}", "-x", "c++"]
    return subprocess.run([*command, "-"], input=source, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(not PYTHON_H.exists(), reason="Python came without its headers")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("PyObject* PyList_GetItem(PyObject* list", "PyObject* PyList_GetItem(int list"),
        ("int64_t* strides;\n", ""),
        ("uint16_t lanes", "uint32_t lanes"),
        ("kDLBfloat = 4", "kDLBfloat = 5"),
        ("  void* managed_tensor_allocator;\n", ""),
        ("  int ml_flags;\n", ""),
        ("MPK_FASTCALL = 0x80", "MPK_FASTCALL = 0x81"),
    ],
)
def test_our_declarations_are_pythons_and_dlpacks(right, wrong):
    assert right in PYTHON_ABI.read_text()
    complaints = complaints_beside_python(PYTHON_ABI.read_text().replace(right, wrong))
    assert ("error" in complaints) == (right != wrong), complaints
