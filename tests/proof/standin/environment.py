"""Builds what the stand-in runs in: a virtual environment with torch's CUDA build, where the stand-in is CUDA's
runtime, and a copy of this checkout with an extension whose kernels are emulated."""

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import ROOT
from tests.proof import emulation

HERE = Path(__file__).parent
TORCH = "2.14.1"
REQUIREMENTS = f"""
torch=={TORCH} nvidia-cuda-crt~=13.0.0 ninja setuptools>=77 numpy pytest pytest-xdist pytest-benchmark hypothesis
expecttest matplotlib rich
""".split()
CUDART, ATEN = "libcudart.so.13", "aten.so"
IGNORED = {"build", "__pycache__", "_native.so", "_build_info.json", "dist"}


class UnavailableError(Exception):
    """torch's CUDA build can't be had here."""


class Environment:
    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.python = self.directory / "venv/bin/python"
        self.library, self.tree = self.directory / "library", self.directory / "tree"

    def build(self) -> None:
        for folder in (self.library, self.tree, self.directory / "home"):
            folder.mkdir(parents=True, exist_ok=True)
        self._install()
        (self.packages,) = (self.directory / "venv").glob("lib/python3*/site-packages")
        self._build_runtime()
        self._build_aten()
        self._attach()
        self._copy_tree()
        self._build_extension()

    def _install(self) -> None:
        note = self.directory / "venv/requirements"
        if note.exists() and note.read_text() == " ".join(REQUIREMENTS):
            return
        shutil.rmtree(self.directory / "venv", ignore_errors=True)
        try:
            _run(sys.executable, "-m", "venv", self.directory / "venv")
            _run(self.python, "-m", "pip", "install", "--quiet", *REQUIREMENTS)
        except RuntimeError as error:
            raise UnavailableError(str(error)[-2000:]) from error
        version = _run(self.python, "-c", "import importlib.metadata as m; print(m.requires('torch'))")
        if "cuda" not in version:
            raise UnavailableError(f"the torch {TORCH} that pip finds is built without CUDA")
        note.write_text(" ".join(REQUIREMENTS))

    def _build_runtime(self) -> None:
        """Compile the library. A function that torch needs and the stand-in lacks says so when it is called."""
        sources = sorted((HERE / "runtime").glob("*.cpp"))
        with _made_of(self.library / CUDART, *sources, HERE / "runtime/machine.h", Path(__file__)) as is_outdated:
            if not is_outdated:
                return
            text = "".join(path.read_text() for path in sources)
            wanted = {name for path in (self.packages / "torch/lib").glob("lib*.so") for name in _undefined(path)}
            lacking = sorted(name for name in wanted if not re.search(rf"\b{name}\(", text))
            refusals, versions = self.library / "refusals.cpp", self.library / "versions"
            refusal = 'int {0}() {{ return standin_refuse("{0}"); }}\n'.format
            body = "int standin_refuse(const char*);\n" + "".join(map(refusal, lacking))
            refusals.write_text(f'#pragma GCC visibility push(default)\nextern "C" {{\n{body}}}\n')
            versions.write_text(f"{CUDART} {{ global: *; }};\n")
            links = [f"-Wl,-soname,{CUDART}", f"-Wl,--version-script={versions}", "-ldl", "-lpthread"]
            _compile("c++17", *self._includes(), *sources, refusals, *links, target=self.library / CUDART)

    def _build_aten(self) -> None:
        target, torch = self.library / ATEN, self.packages / "torch"
        flags = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib"]
        links = [f"-Wl,-rpath,{torch}/lib", *(f"-l{it}" for it in ("torch_cpu", "torch_cuda", "c10", "c10_cuda"))]
        with _made_of(target, HERE / "aten.cpp", HERE / "views.h", Path(__file__)) as is_outdated:
            if is_outdated:
                flags += self._includes()
                _compile("c++20", "-w", *flags, HERE / "aten.cpp", self.library / CUDART, *links, target=target)

    def _includes(self) -> list[str]:
        return [f"-I{self.packages / 'nvidia/cu13/include'}"]

    def _attach(self) -> None:
        _link(self.packages / "nvidia/cu13/lib" / CUDART, self.library / CUDART)
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):  # of the driver
            _link(self.packages / "torch/lib" / name, self.library / CUDART)
        shutil.copy(HERE / "attach.py", self.library / "standin_attach.py")
        info = self.library / "standin-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Name: standin\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\nstandin = standin_attach:attach\n")
        (self.packages / "standin.pth").write_text(f"{self.library}\n")

    def _copy_tree(self) -> None:
        """Copy files that have changed, and remove those that are no longer there."""
        there = {path.relative_to(ROOT) for path in _files(ROOT)}
        for path in {path.relative_to(self.tree) for path in _files(self.tree)} - there:
            (self.tree / path).unlink()
        for path in there:
            to = self.tree / path
            if not to.exists() or to.read_bytes() != (ROOT / path).read_bytes():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, to)

    def _build_extension(self) -> None:
        sources, objects = emulation.sources_with("on_streams"), self.directory / "objects"
        objects.mkdir(exist_ok=True)
        with _made_of(
            objects / "all", *(path for path in _files(ROOT) if path.suffix in (".h", ".cpp"))
        ) as are_outdated:
            if are_outdated:
                emulation.compile_all(emulation.find_compiler(), sources, ROOT / "csrc", objects)
        linked = [*(objects / f"{path.name}.o" for path in sources), self.library / CUDART]
        _run(self.python, "-m", "tests.proof.emulation.extension", *self._includes(), *linked, cwd=self.tree)


def _files(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        if path.name in IGNORED or (path.name.startswith(".") and path.name != ".ci"):
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


@contextmanager
def _made_of(target: Path, *sources: Path) -> Iterator[bool]:
    """Yield whether the target has to be made. If that goes well, note what it is made of."""
    digest = hashlib.sha256(" ".join(REQUIREMENTS).encode())
    for path in sources:
        digest.update(path.read_bytes())
    note = target.with_name(f"{target.name}.sha256")
    yield not note.exists() or note.read_text() != digest.hexdigest()
    note.write_text(digest.hexdigest())


def _compile(language: str, *arguments: object, target: Path) -> None:
    _run("g++", f"-std={language}", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", *arguments, "-o", target)


def _undefined(library: Path) -> set[str]:
    """Return the functions of CUDA's runtime that a library takes from another."""
    return {*re.findall(r" U ((?:__)?cuda[A-Z]\w*)", _run("nm", "-D", "--undefined-only", library))}


def _link(at: Path, to: Path) -> None:
    at.unlink(missing_ok=True)
    at.symlink_to(to)


def _run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"stand-in: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout
