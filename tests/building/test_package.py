"""The package after ``import mpkernels``."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mpkernels
from mpkernels.ops import _extension

SUBMODULES = """
import mpkernels
print(mpkernels.optim.AdamW, mpkernels.amp.GradScaler, mpkernels.nn.LinearAct, mpkernels.functional.linear_act)
print(mpkernels.doctor.advise, mpkernels.ops.unscale_, mpkernels.selector.choices)
"""


def test_submodules_need_no_import_of_their_own():
    command = [sys.executable, "-W", "error", "-c", SUBMODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_of_the_same_name_is_not_taken_for_the_package(tmp_path):
    """Such as the checkout itself, for a script in the folder that holds it."""
    (tmp_path / "mpkernels").mkdir()
    command = [sys.executable, "-c", "import mpkernels; mpkernels.nn"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("noted", "found"), [('{"sources": "abc"}', {"sources": "abc"}), ('{"sources": ', {}), (None, {})]
)
def test_the_build_info_may_be_damaged_or_missing(tmp_path, noted, found):
    """Otherwise the package could neither be imported nor say how to build it again."""
    if noted is not None:
        (tmp_path / "_build_info.json").write_text(noted)
    assert _extension.build_info(tmp_path / "_native.so") == found


DAMAGES = {
    "glibc is too old": (lambda it: it.replace(b"\0GLIBC_2.", b"\0GLIBC_9."), "version `GLIBC_9."),
    "libstdc++ is too old": (lambda it: it.replace(b"\0GLIBCXX_3", b"\0GLIBCXX_9"), "version `GLIBCXX_9"),
    "torch lacks a symbol": (
        lambda it: it.replace(b"\0aoti_torch_", b"\0aoti_other_"),
        "undefined symbol: aoti_other_",
    ),
    "for another processor": (lambda it: it[:18] + b"\xb7\0" + it[20:], "_native.so: "),
    "of 32 bits": (lambda it: it[:4] + b"\1" + it[5:], "wrong ELF class"),
    "half a file": (lambda it: it[: len(it) // 2], "file too short"),
    "all but the last byte": (lambda it: it[:-1], "file too short"),
    "half a header": (lambda it: it[:32], "file too short"),
    "an empty file": (lambda it: b"", "file too short"),
    "a pointer of git-lfs": (lambda it: b"version https://git-lfs.github.com/spec/v1\n" * 2, "_native.so: "),
}
built = pytest.mark.skipif(_extension.LIBRARY is None, reason="there are no compiled kernels to damage")


@built
@pytest.mark.parametrize("damage", DAMAGES)
def test_kernels_that_cannot_be_loaded_are_left_out(tmp_path, monkeypatch, damage):
    change, why = DAMAGES[damage]
    library = tmp_path / "_native.so"
    library.write_bytes(change(_extension.LIBRARY.read_bytes()))
    monkeypatch.setattr(_extension, "LIBRARY", library)
    monkeypatch.setattr(_extension, "why_none", "")
    monkeypatch.setattr(_extension, "_handle", _extension._handle.__wrapped__)
    with pytest.warns(RuntimeWarning, match="^mpkernels: the compiled kernels in .* can't be loaded") as warned:
        _extension.load()
    [warning] = warned
    assert why in str(warning.message)
    assert f"`{sys.executable} -m pip install -v -e .` builds them" in str(warning.message)
    assert _extension.LIBRARY is None
    assert _extension.ask_driver() is None
    assert not _extension.multiplies_halves(torch.bfloat16)


NEWEST = {"GLIBC": "2.28", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}  # manylinux_2_28


def numbers(version):
    return [*map(int, version.split("."))]


def newer_than_allowed(readelf):
    """Return the versions in readelf's words that no library in a wheel for manylinux_2_28 may need."""
    needed = re.findall(r"Name: ([A-Z]+)_(\S+) +Flags", readelf.partition("Version needs section")[2])
    assert {"GLIBC", "GLIBCXX"} <= {name for name, _ in needed}
    return [it for it in needed if not it[1][0].isdigit() or numbers(it[1]) > numbers(NEWEST[it[0]])]


def test_what_is_newer_than_glibc_2_28_is_noticed():
    line = "  0x0010:   Name: {}  Flags: none  Version: 18\n"
    needs = "Version needs section\n" + "".join(map(line.format, ("GLIBC_2.28", "GLIBC_2.3.4", "GLIBCXX_3.4.24")))
    assert newer_than_allowed(needs) == []
    for name in ("GLIBC_2.29", "GLIBCXX_3.4.25", "CXXABI_1.3.12", "GLIBC_ABI_DT_RELR"):
        assert newer_than_allowed(needs + line.format(name)) == [tuple(name.split("_", 1))]


@built
@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_the_library_needs_no_more_than_glibc_2_28():
    """Static cudart, ``pow`` and the headers of libstdc++ asked for more."""
    readelf = subprocess.run(["readelf", "-VW", _extension.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert newer_than_allowed(readelf) == []
    symbols = subprocess.run(["objdump", "-T", _extension.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert re.search(r"\(GLIBC_\S+\) pow$", symbols, re.MULTILINE)  # not without a version, which nobody would check


WITHOUT_KERNELS = """
import torch
from mpkernels.__main__ import main
from mpkernels.optim import AdamW
weight = torch.ones(3, requires_grad=True)
weight.grad = torch.ones(3)
AdamW([weight], lr=0.5, weight_decay=0.0).step()
assert torch.allclose(weight, torch.full((3,), 0.5)), weight
main(["doctor"])
"""


@built
def test_a_package_whose_kernels_cannot_be_loaded_computes_and_doctor_says_why(tmp_path):
    package = Path(mpkernels.__file__).parent
    shutil.copytree(package, tmp_path / "mpkernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    damaged = DAMAGES["libstdc++ is too old"][0](_extension.LIBRARY.read_bytes())
    (tmp_path / "mpkernels" / "_native.so").write_bytes(damaged)
    command = [sys.executable, "-c", WITHOUT_KERNELS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning") == 1
    why = f"native on cpu     the compiled kernels in {tmp_path}/mpkernels can't be loaded"
    assert why in done.stdout
    assert "version `GLIBCXX_9" in done.stdout
    assert "Training works, but every op runs on the slow reference" in done.stdout


def test_copies_that_nobody_waits_for_are_made_in_four_places():
    """parameters.py decides whether a copy to the host waits, readback.py reads after the copy has arrived, and
    copies.py waits for its streams. _tensor_table.py copies to the device from memory that nobody writes to."""
    root = Path(mpkernels.__file__).parent
    found = [path.relative_to(root) for path in root.rglob("*.py") if "non_blocking" in path.read_text()]
    assert sorted(map(str, found)) == [
        *("_shared/parameters.py", "ops/_tensor_table.py", "optim/offload/copies.py", "optim/readback.py")
    ]
