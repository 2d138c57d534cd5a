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
from tests.building.builds import attempt, copy_checkout, python

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
IN_TRITON = """
try:
    with mpkernels.backend("triton"):
        mpkernels.ops.grad_stats(grads)
except NotImplementedError as error:
    print(error)
"""


class Built(NamedTuple):
    tree: Path
    output: str
    wheel: Path


def modules(tree: Path) -> set[str]:
    return {path.relative_to(tree).as_posix() for path in (tree / "mpkernels").rglob("*.py")}


def modules_in(wheel: Path) -> set[str]:
    return {name for name in ZipFile(wheel).namelist() if name.endswith(".py")}


def unscale_with(kernels: list[str], tree: Path) -> str:
    """Run an op of the package in ``tree``, which must have these CPU kernels, of which none is Triton's. Return the
    warnings."""
    output = python("-W", "always", "-c", UNSCALE + IN_TRITON, cwd=tree, PYTHONPATH=str(tree))
    *warnings, results, available, error = output.splitlines()
    assert error == f"grad_stats: no triton kernel on cpu, only {', '.join(kernels)}"
    assert results == f"{tree}/mpkernels/__init__.py tensor([  8., -12.]) tensor([inf]) tensor(1.)"
    assert available == f"{kernels} False"
    return "\n".join(warnings)


@pytest.fixture
def checkout(tmp_path):
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """Install what setup.py asks for without build isolation into a folder: the tests' own environment may lack it.
    Return the variables that make it known."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    (old / "setuptools.py").write_text("__version__ = '65.5.0'")  # which Python 3.11 puts in a virtual environment
    status, output = attempt(sys.executable, "setup.py", cwd=ROOT, PYTHONPATH=str(old))
    assert status == 1
    assert "Traceback" not in output
    wanted = shlex.split(output.partition("pip install -U ")[2])
    python("-m", "pip", "install", f"--target={new}", *wanted, cwd=new)
    return {"PYTHONPATH": str(new), "PATH": f"{new / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def built(tmp_path_factory, tools):
    """Build a wheel as users do, with isolation. The build runs in the sdist, which must hold all that it needs."""
    directory = tmp_path_factory.mktemp("built")
    python("setup.py", "sdist", f"--dist-dir={directory}", cwd=copy_checkout(directory / "checkout"), **tools)
    [sdist] = directory.glob("*.tar.gz")
    subprocess.run(["tar", "-xf", sdist, "-C", directory], check=True)
    tree = directory / sdist.name.removesuffix(".tar.gz")
    if (ROOT / "build" / "native").exists():  # what the same commands have compiled here is not compiled again
        shutil.copytree(ROOT / "build" / "native", tree / "build" / "native")
    output = python(*PIP_WHEEL, cwd=tree)
    [wheel] = (tree / "wheels").iterdir()
    return Built(tree, output, wheel)


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


def test_the_version_is_written_in_one_place():
    files = [ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "mpkernels").rglob("*.py"), ROOT / "docs" / "conf.py"]
    written = [path.relative_to(ROOT).as_posix() for path in files if f'"{mpkernels.__version__}"' in path.read_text()]
    assert written == ["mpkernels/__init__.py"]


@pytest.mark.exhaustive
def test_the_build_installs_no_torch(built):
    [installed] = re.findall("Installing collected packages: (.*)", built.output)
    assert sorted(installed.split(", ")) == ["ninja", "setuptools"]


@pytest.mark.exhaustive
def test_the_build_reports_each_part_as_built_or_left_out(built):
    info = json.loads(ZipFile(built.wheel).read("mpkernels/_build_info.json"))
    assert info.keys() == {"sources", "cpu", "cuda"}
    for part in ("cpu", "cuda"):
        it = info[part]
        [outcome] = re.findall(f"mpkernels: {part.upper()} kernels: (.*)", built.output)
        what = f"left out: {it['left_out']}" if it["left_out"] else f"built for {', '.join(it['built_for'])} with"
        assert outcome.startswith(what)


@pytest.mark.exhaustive
def test_without_nvcc_cuda_is_left_out_and_the_cpu_kernels_work(rebuildable, tools):
    output = python("-c", WITHOUT_NVCC, cwd=rebuildable, **tools)
    assert "mpkernels: CUDA kernels: left out: no nvcc found\n" in output
    unscale_with(["native", "reference"], rebuildable)


@pytest.mark.exhaustive
def test_a_deleted_module_is_not_shipped(rebuildable, tools):
    (rebuildable / "mpkernels" / "ops" / "grads" / "unscale_triton.py").unlink()
    python(*PIP_WHEEL, "--no-build-isolation", cwd=rebuildable, **tools)
    [wheel] = (rebuildable / "wheels").iterdir()
    assert modules_in(wheel) == modules(rebuildable)


@pytest.mark.parametrize("env", [{"CXX": "no-such-compiler"}, {"CXX": "", "PATH": "/nowhere"}], ids=["CXX", "PATH"])
def test_without_a_compiler_the_build_says_how_to_get_one(checkout, tools, env):
    status, output = attempt(sys.executable, "setup.py", "build_ext", cwd=checkout, **tools | env)
    assert status == 1
    assert "Traceback" not in output
    [paragraph] = [line for line in output.splitlines() if "mpkernels: " in line]
    assert (env["CXX"] or "no C++ compiler") in paragraph
    assert "`apt install g++`" in paragraph


def test_a_compile_error_is_shown_and_ends_the_build(checkout, tools):
    shutil.rmtree(checkout / "csrc")
    (checkout / "csrc").mkdir()
    (checkout / "csrc" / "wrong_torch.cpp").write_text("int answer = undeclared;\n")
    status, output = attempt(sys.executable, *PIP_WHEEL, "--no-build-isolation", cwd=checkout, **tools)
    assert status == 1
    assert "Traceback" not in output
    assert re.search(r"wrong_torch\.cpp:1:14: error: .*undeclared", output)
    assert "the compiler's words are above" in output


def test_without_its_library_the_package_warns_once_and_works(checkout):
    shutil.rmtree(checkout / "csrc")  # or it would take the library of an installed mpkernels
    output = unscale_with(["reference"], checkout)
    assert output.count("RuntimeWarning: mpkernels") == 1
    assert f"{sys.executable} -m pip install -v -e ." in output


INSTALLS = {"plain": ["."], "editable": ["-e", "."], "wheel": ["{wheel}"]}
BENCHMARK = ("-m", "pytest", "-q", "benchmarks", "--benchmark-disable", "-k", "update_scale_")
TEST = ("-m", "pytest", "-q", "tests/ops/grads/test_update_scale.py", "-k", "cpu-native", "--require=cpu-native")


@pytest.fixture(params=INSTALLS)
def installed(request, built, tools, tmp_path):
    """A fresh clone, and a Python into which it was installed; what was compiled before is not compiled again."""
    clone, venv = copy_checkout(tmp_path / "mpkernels"), tmp_path / "venv"
    shutil.copytree(built.tree / "build" / "native", clone / "build" / "native")
    python("-m", "venv", "--without-pip", str(venv), cwd=tmp_path)
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "outside.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    words = [word.format(wheel=built.wheel) for word in INSTALLS[request.param]]
    pip = ("-m", "pip", f"--python={venv}/bin/python", "install", "--no-deps", "--no-build-isolation")
    python(*pip, "--ignore-installed", *words, cwd=clone, **tools)
    place = (clone if request.param == "editable" else packages) / "mpkernels"

    def run(*words):
        return attempt(f"{venv}/bin/python", *words, cwd=clone, PYTHONPATH="")

    return clone, place / "_native.so", run


@pytest.mark.exhaustive
def test_a_clone_runs_on_the_kernels_that_were_installed_from_it(installed):
    """Python that runs in the clone's folder imports the package from there, not the installed one. A script beside the
    folder imports what was installed: the folder, of the package's name, isn't the package."""
    clone, library, run = installed
    script = clone.parent / "beside.py"
    script.write_text("import mpkernels\nprint(mpkernels.nn, mpkernels.__file__)")
    status, output = run("-W", "error", str(script))
    assert (status, output.split()[-1:]) == (0, [f"{library.parent}/__init__.py"]), output
    status, output = run("-W", "error", "-m", "mpkernels", "doctor", "--json")
    assert status == 0, output
    found = json.loads(output)
    assert found["machine"]["library"] == str(library)
    assert found["kernels"]["unscale_"]["cpu"] == ["native", "reference"]
    for words in (BENCHMARK, TEST, ("-W", "error", "examples/quickstart.py")):
        status, output = run(*words)
        assert status == 0, output
    with (clone / "csrc" / "grads" / "unscale.h").open("a") as source:
        source.write("\n// newer than what was built\n")
    status, output = run("-W", "always", "-c", "import mpkernels; print(mpkernels.backends('unscale_', 'cpu'))")
    assert status == 0, output
    warning = f"the compiled kernels in {library.parent} were built from other sources than those in {clone}/csrc"
    assert warning in output
    assert output.endswith("['reference']\n")


def required_packages(name: str) -> set[str]:
    """Return a package and the installed packages that it requires, directly or not."""
    found, new = set(), {name}
    while new:
        found |= new
        required = [it for package in new for it in metadata.requires(package) or () if "extra ==" not in it]
        names = {re.match(r"[\w.-]+", it)[0] for it in required}
        new = {it for it in names if any(metadata.Distribution.discover(name=it))} - found
    return found


@pytest.fixture
def bare(tmp_path):
    """A Python that has torch, what torch needs, and nothing else."""
    venv, packages = tmp_path / "bare", tmp_path / "packages"
    packages.mkdir()
    for name in required_packages("torch"):
        package = metadata.distribution(name)
        for top in {path.parts[0] for path in package.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(package.locate_file(top))
    python("-m", "venv", "--without-pip", str(venv), cwd=tmp_path)
    [site_packages] = venv.glob("lib/python*/site-packages")
    (site_packages / "torch.pth").write_text(str(packages))
    return venv / "bin" / "python"


@pytest.mark.exhaustive
def test_the_wheel_works_where_there_is_nothing_but_torch(built, bare, tmp_path):
    """There is no checkout either."""
    python("-m", "pip", f"--python={bare}", "install", "--no-deps", str(built.wheel), cwd=tmp_path)
    status, output = attempt(str(bare), "-c", "import numpy", cwd=tmp_path)
    assert status == 1, output
    strict = ("-W", "error", "-W", "ignore:Failed to initialize NumPy")  # torch's own
    status, output = attempt(str(bare), *strict, "-m", "mpkernels", "doctor", "--json", cwd=tmp_path)
    assert status == 0, output
    found = json.loads(output)
    assert found["machine"]["library"] == str(next((tmp_path / "bare").rglob("_native.so")))
    for by_device in found["kernels"].values():
        assert by_device["cpu"] == ["native", "reference"]
        assert ("native" in by_device["cuda"]) == bool(found["builds"]["cuda"]["built_for"])
    assert found["verdict"].startswith("Ready to train on ")
    status, output = attempt(str(bare), str(ROOT / "examples" / "quickstart.py"), cwd=tmp_path)
    assert status == 0, output
