"""The build, through the commands that a user types, in copies of the checkout."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

import mpkernels
from tests import ROOT
from tests.builds import attempt, copy_checkout, python

pytestmark = pytest.mark.begins_first
PIP_WHEEL = ("-m", "pip", "wheel", "-v", "--no-deps", "--wheel-dir=wheels", ".")

WITHOUT_NVCC = """
import runpy, shutil, sys
which = shutil.which
shutil.which = lambda name, **options: None if name.endswith("nvcc") else which(name, **options)
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""

UNSCALE = """
import torch
import mpkernels
grads, found_inf = [torch.tensor([2.0, -3.0]), torch.tensor([3e38])], torch.zeros(())
mpkernels.ops.unscale_(grads, found_inf, torch.tensor(4.0))
print(mpkernels.__file__, *grads, found_inf)
print(mpkernels.backends("unscale_", "cpu"), "native" in mpkernels.backends("unscale_", "cuda"))
"""


class Built(NamedTuple):
    tree: Path
    said: str
    wheel: Path


def modules(tree: Path) -> set[str]:
    return {path.relative_to(tree).as_posix() for path in (tree / "mpkernels").rglob("*.py")}


def modules_in(wheel: Path) -> set[str]:
    return {name for name in ZipFile(wheel).namelist() if name.endswith(".py")}


def unscale_with(kernels: list[str], tree: Path) -> str:
    """Runs an op of the package in ``tree``, which must have these CPU kernels; returns what was said on the way."""
    said = python("-W", "always", "-c", UNSCALE, cwd=tree, PYTHONPATH=str(tree))
    *warnings, results, available = said.splitlines()
    assert results == f"{tree}/mpkernels/__init__.py tensor([  8., -12.]) tensor([inf]) tensor(1.)"
    assert available == f"{kernels} False"
    return "\n".join(warnings)


@pytest.fixture
def checkout(tmp_path):
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """What setup.py asks for where isolation is off, installed apart: the tests' own environment may lack it."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    (old / "setuptools.py").write_text("__version__ = '65.5.0'")  # which Python 3.11 puts in a virtual environment
    status, said = attempt(sys.executable, "setup.py", cwd=ROOT, PYTHONPATH=str(old))
    assert status == 1
    assert "Traceback" not in said
    wanted = shlex.split(said.partition("pip install -U ")[2])
    python("-m", "pip", "install", f"--target={new}", *wanted, cwd=new)
    return {"PYTHONPATH": str(new), "PATH": f"{new / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def built(tmp_path_factory, tools):
    """A wheel built as users build it, with isolation; but in the sdist, which must hold all that takes."""
    directory = tmp_path_factory.mktemp("built")
    python("setup.py", "sdist", f"--dist-dir={directory}", cwd=copy_checkout(directory / "checkout"), **tools)
    [sdist] = directory.glob("*.tar.gz")
    subprocess.run(["tar", "-xf", sdist, "-C", directory], check=True)
    tree = directory / sdist.name.removesuffix(".tar.gz")
    if (ROOT / "build" / "native").exists():  # what was compiled here, by the same words, need not be compiled again
        shutil.copytree(ROOT / "build" / "native", tree / "build" / "native")
    said = python(*PIP_WHEEL, cwd=tree)
    [wheel] = (tree / "wheels").iterdir()
    return Built(tree, said, wheel)


@pytest.fixture
def rebuildable(built, tmp_path):
    return shutil.copytree(built.tree, tmp_path / "tree")  # the times of files stay, so ninja compiles little


@pytest.mark.exhaustive
def test_one_wheel_serves_every_python(built):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert built.wheel.name == f"mpkernels-{mpkernels.__version__}-py3-none-{platform}.whl"
    assert modules_in(built.wheel) == modules(built.tree.with_name("checkout"))
    beside = {f"mpkernels/{name}" for name in ("_native.so", "_build_info.json", "py.typed")}
    assert beside < {*ZipFile(built.wheel).namelist()}


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_the_library_needs_torch_but_neither_cpython_nor_cudart(built, tmp_path):
    library = ZipFile(built.wheel).extract("mpkernels/_native.so", tmp_path)
    _, symbols = attempt("nm", "-D", "--undefined-only", library, cwd=tmp_path)
    assert " aoti_torch_" in symbols
    assert re.findall(r" U (_?Py\w+)", symbols) == []  # only weakly, and of its stable ABI
    _, dynamic = attempt("readelf", "-d", library, cwd=tmp_path)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch.so" in needed
    assert [name for name in needed if "cudart" in name or "python" in name] == []
    _, sections = attempt("readelf", "-SW", library, cwd=tmp_path)
    info = json.loads(ZipFile(built.wheel).read("mpkernels/_build_info.json"))
    assert (" .nv_fatbin " in sections) == bool(info["cuda"]["built_for"])


def test_the_version_has_one_place():
    of_build = [
        ROOT / "pyproject.toml",
        ROOT / "setup.py",
        *(ROOT / "mpkernels").rglob("*.py"),
        ROOT / "docs" / "conf.py",
    ]
    written = [
        path.relative_to(ROOT).as_posix() for path in of_build if f'"{mpkernels.__version__}"' in path.read_text()
    ]
    assert written == ["mpkernels/__init__.py"]


@pytest.mark.exhaustive
def test_the_build_installs_no_torch(built):
    [installed] = re.findall("Installing collected packages: (.*)", built.said)
    assert sorted(installed.split(", ")) == ["ninja", "setuptools"]


@pytest.mark.exhaustive
def test_the_build_says_of_each_part_what_it_did(built):
    info = json.loads(ZipFile(built.wheel).read("mpkernels/_build_info.json"))
    assert info.keys() == {"sources", "cpu", "cuda"}
    for part in ("cpu", "cuda"):
        it = info[part]
        [outcome] = re.findall(f"mpkernels: {part.upper()} kernels: (.*)", built.said)
        what = f"left out: {it['left_out']}" if it["left_out"] else f"built for {', '.join(it['built_for'])} with"
        assert outcome.startswith(what)


@pytest.mark.exhaustive
def test_without_nvcc_cuda_is_left_out_and_the_cpu_kernels_work(rebuildable, tools):
    said = python("-c", WITHOUT_NVCC, cwd=rebuildable, **tools)
    assert "mpkernels: CUDA kernels: left out: no nvcc found\n" in said
    unscale_with(["native", "reference"], rebuildable)


@pytest.mark.exhaustive
def test_a_deleted_module_is_not_shipped(rebuildable, tools):
    (rebuildable / "mpkernels" / "ops" / "grads" / "unscale_triton.py").unlink()
    python(*PIP_WHEEL, "--no-build-isolation", cwd=rebuildable, **tools)
    [wheel] = (rebuildable / "wheels").iterdir()
    assert modules_in(wheel) == modules(rebuildable)


@pytest.mark.parametrize("env", [{"CXX": "no-such-compiler"}, {"CXX": "", "PATH": "/nowhere"}], ids=["CXX", "PATH"])
def test_without_a_compiler_it_says_how_to_get_one(checkout, tools, env):
    status, said = attempt(sys.executable, *PIP_WHEEL, "--no-build-isolation", cwd=checkout, **tools | env)
    assert status == 1
    assert "Traceback" not in said
    [paragraph] = [line for line in said.splitlines() if "mpkernels: " in line]
    assert (env["CXX"] or "no C++ compiler") in paragraph
    assert "`apt install g++`" in paragraph


def test_a_compile_error_is_shown_and_fails(checkout, tools):
    shutil.rmtree(checkout / "csrc")
    (checkout / "csrc").mkdir()
    (checkout / "csrc" / "wrong_torch.cpp").write_text("int answer = undeclared;\n")
    status, said = attempt(sys.executable, *PIP_WHEEL, "--no-build-isolation", cwd=checkout, **tools)
    assert status == 1
    assert "Traceback" not in said
    assert re.search(r"wrong_torch\.cpp:1:14: error: .*undeclared", said)
    assert "the compiler's words are above" in said


def test_without_the_library_it_warns_once_and_works(checkout):
    shutil.rmtree(checkout / "csrc")  # or it would take the library of an installed mpkernels
    said = unscale_with(["reference"], checkout)
    assert said.count("RuntimeWarning: mpkernels") == 1
    assert f"{sys.executable} -m pip install -v -e ." in said


INSTALLS = {"plain": ["."], "editable": ["-e", "."], "wheel": ["{wheel}"]}
BENCHMARK = ("-m", "pytest", "-q", "benchmarks", "--benchmark-disable", "-k", "update_scale_")
TEST = ("-m", "pytest", "-q", "tests/ops/grads/test_update_scale.py", "-k", "cpu-native", "--require=cpu-native")


@pytest.fixture(params=INSTALLS)
def installed(request, built, tools, tmp_path):
    """A fresh clone, and a Python into which it was installed; what was compiled before is not compiled again."""
    clone, venv = copy_checkout(tmp_path / "clone"), tmp_path / "venv"
    shutil.copytree(built.tree / "build" / "native", clone / "build" / "native")
    python("-m", "venv", "--without-pip", str(venv), cwd=tmp_path)
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "outside.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    words = [word.format(wheel=built.wheel) for word in INSTALLS[request.param]]
    pip = ("-m", "pip", f"--python={venv}/bin/python", "install", "--no-deps", "--no-build-isolation")
    python(*pip, "--ignore-installed", *words, cwd=clone, **tools)
    place = (clone if request.param == "editable" else packages) / "mpkernels"

    def run(*words):
        return attempt(f"{venv}/bin/python", *words, cwd=clone)

    return clone, place / "_native.so", run


@pytest.mark.exhaustive
def test_a_clone_runs_on_the_kernels_that_were_installed_from_it(installed):
    """The clone's folder hides the installed package from Python that runs there."""
    clone, library, run = installed
    status, said = run("-W", "error", "-m", "mpkernels", "doctor", "--json")
    assert status == 0, said
    found = json.loads(said)
    assert found["machine"]["library"] == str(library)
    assert found["kernels"]["unscale_"]["cpu"] == ["native", "reference"]
    for words in (BENCHMARK, TEST, ("-W", "error", "examples/quickstart.py")):
        status, said = run(*words)
        assert status == 0, said
    with (clone / "csrc" / "grads" / "unscale.h").open("a") as source:
        source.write("\n// newer than what was built\n")
    status, said = run("-W", "always", "-c", "import mpkernels; print(mpkernels.backends('unscale_', 'cpu'))")
    assert status == 0, said
    assert f"the compiled kernels in {library.parent} were built from other sources than those in {clone}/csrc" in said
    assert said.endswith("['reference']\n")


def needs_of(name: str) -> set[str]:
    """The installed packages that this one can't do without, itself included."""
    found, new = set(), {name}
    while new:
        found |= new
        required = [it for each in new for it in metadata.requires(each) or () if "extra ==" not in it]
        names = {re.match(r"[\w.-]+", it)[0] for it in required}
        new = {it for it in names if any(metadata.Distribution.discover(name=it))} - found
    return found


@pytest.fixture
def bare(tmp_path):
    """A Python that has torch, what torch needs, and nothing else."""
    venv, packages = tmp_path / "bare", tmp_path / "packages"
    packages.mkdir()
    for name in needs_of("torch"):
        package = metadata.distribution(name)
        for top in {path.parts[0] for path in package.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(package.locate_file(top))
    python("-m", "venv", "--without-pip", str(venv), cwd=tmp_path)
    [own] = venv.glob("lib/python*/site-packages")
    (own / "torch.pth").write_text(str(packages))
    return venv / "bin" / "python"


@pytest.mark.exhaustive
def test_the_wheel_works_where_there_is_nothing_but_torch(built, bare, tmp_path):
    """There is no checkout either."""
    python("-m", "pip", f"--python={bare}", "install", "--no-deps", str(built.wheel), cwd=tmp_path)
    status, said = attempt(str(bare), "-c", "import numpy", cwd=tmp_path)
    assert status == 1, said
    strict = ("-W", "error", "-W", "ignore:Failed to initialize NumPy")  # torch's own
    status, said = attempt(str(bare), *strict, "-m", "mpkernels", "doctor", "--json", cwd=tmp_path)
    assert status == 0, said
    found = json.loads(said)
    assert found["machine"]["library"] == str(next((tmp_path / "bare").rglob("_native.so")))
    for of_op in found["kernels"].values():
        assert of_op["cpu"] == ["native", "reference"]
        assert ("native" in of_op["cuda"]) == bool(found["builds"]["cuda"]["built_for"])
    assert found["verdict"].startswith("Ready to train on ")
    status, said = attempt(str(bare), str(ROOT / "examples" / "quickstart.py"), cwd=tmp_path)
    assert status == 0, said
