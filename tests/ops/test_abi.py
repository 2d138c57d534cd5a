"""csrc/common/torch_abi.h declares torch's C functions by hand.

A compiler that sees their own declarations beside ours refuses any that differ.
"""

import re
import shutil
import subprocess
from pathlib import Path

import torch

from tests import ROOT

CSRC = ROOT / "csrc"
OURS = CSRC / "common" / "torch_abi.h"
TORCH = Path(torch.__file__).parent
CPU = "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>\n"


def compiler_errors_beside_torch(ours):
    """Return what the compiler prints if our declarations stand beside torch's headers."""
    source = f"#define USE_CUDA\n#include <torch/csrc/stable/c/shim.h>\n{CPU}{ours}\n"
    compiler = shutil.which("c++") or shutil.which("g++")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{TORCH / 'include'}", "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr


def test_our_declarations_agree_with_torchs():
    assert "error" not in compiler_errors_beside_torch(OURS.read_text())


def test_a_wrong_declaration_would_be_refused():
    wrong = OURS.read_text().replace(
        "aoti_torch_get_numel(AtenTensorHandle tensor,", "aoti_torch_get_numel(int tensor,"
    )
    assert "error" in compiler_errors_beside_torch(wrong)


def test_torch_declares_every_function_that_we_do():
    """The compiler takes a misspelt name for a new function, which is then missing when the library is loaded."""
    inductor = TORCH / "include/torch/csrc/inductor/aoti_torch"
    headers = [TORCH / "include/torch/csrc/stable/c/shim.h", inductor / "c/shim.h", inductor / "generated/c_shim_cpu.h"]
    known = " ".join(header.read_text() for header in headers)
    declared = re.findall(r"\b((?:aoti_)?torch_\w+)\(", OURS.read_text())
    assert len(declared) > 20
    assert [name for name in declared if not re.search(rf"\b{name}\(", known)] == []
