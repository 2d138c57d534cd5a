"""Builds mpkernels/_native.so with ninja. Everything else about the package is in pyproject.toml.

pip calls setuptools' hooks through this module, which keeps --config-settings; the hooks then run it as a script.

The C++ declares the few functions of torch's stable ABI that it calls. So the build never looks for a torch,
and one library serves every torch and every Python that pyproject.toml admits.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import setuptools

TOOLS_MISSING = "mpkernels: to build without isolation, first run: pip install -U 'setuptools>=77' ninja"
if int(setuptools.__version__.partition(".")[0]) < 77:  # an older one misreads pyproject.toml
    raise SystemExit(TOOLS_MISSING)

from setuptools import build_meta  # noqa: E402
from setuptools.build_meta import *  # noqa: E402, F403
from setuptools.command import bdist_wheel, build, build_ext  # noqa: E402

import toolchain  # noqa: E402

BUILD = "build/native"
LIBRARY = f"{BUILD}/_native.so"
SILENCE = 20  # seconds, after which the build says that it goes on: one file may take minutes


def jobs_in_memory() -> int:
    """Return how many compilers fit into memory, at 1 GB each. ninja itself limits jobs by cores."""
    fits = [16]
    for file, amount, gb in (
        ("/proc/meminfo", r"MemAvailable: *(\d+)", 1 << 20),
        ("/sys/fs/cgroup/memory.max", r"(\d+)", 1 << 30),  # a container's limit
    ):
        if os.path.exists(file) and (match := re.search(amount, Path(file).read_text())):
            fits.append(int(match[1]) // gb)
    return max(1, min(fits))


def write_if_new(path: Path, text: str) -> None:
    """Write the file only if its text changes: ninja compiles again what is older than the file."""
    os.makedirs(path.parent, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


# ninja compiles an object again if its sources or its command have changed. The commands lie in files of ours, and
# ninja goes by files' times alone (generator, and no deps): versions of ninja can't read each other's notes, so that
# pip's ninja would compile again all that another front end has compiled.
def ninja_file(cxx: str, cuda: toolchain.Cuda) -> str:
    objects, edges = [], []

    def add(sources: str, command: str, variant: str = "") -> None:
        for source in sorted(Path("csrc").rglob(sources)):
            objects.append(f"{BUILD}/{source.stem}{variant}.o")
            edges.append(f"build {objects[-1]}: compile {source} | {objects[-1]}.by\n  compile = {command}\n")
            write_if_new(Path(f"{objects[-1]}.by"), f"{command} {toolchain.COMMON_FLAGS}\n")

    if cuda.compile:
        add("*_cuda.cu", cuda.compile)
    add("*_torch.cpp", f"{cxx} {toolchain.CXX_FLAGS} {cuda.includes}")
    # The linker keeps the first copy of an inline function that several objects have. So the widest instruction set
    # comes last: its copies must not end up in code that every CPU runs.
    for isa, flags in toolchain.ISAS.items():
        add("*_cpu.cpp", f"{cxx} {toolchain.CXX_FLAGS} {flags} -DMPK_ISA={isa}", f".{isa}")

    stubs, libraries = "", "-undefined dynamic_lookup"
    if sys.platform != "darwin":
        # Weak references find libtorch.so only if DT_NEEDED names it; an empty library of that name will do.
        functions: dict[str, dict[str, list[str]]] = {"libtorch.so": {}}
        # Found here before glibc, in the libraries that held most of them until glibc 2.34.
        if older := toolchain.older_functions(cxx):
            functions |= {"libpthread.so.0": older, "libdl.so.2": {}, "librt.so.1": {}}
        edges += [write_stub(name, by_version) for name, by_version in functions.items()]
        stubs = " ".join(f"{BUILD}/{name}" for name in functions)
        libraries = f"-Wl,--no-as-needed {stubs} {cuda.libraries}"
    return f"""\
builddir = {BUILD}
pool memory
  depth = {jobs_in_memory()}
rule compile
  description = compiles $in
  command = $compile {toolchain.COMMON_FLAGS} -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  generator = 1
  pool = memory
rule link
  description = links $out
  command = {cxx} -shared -o $out $in $flags
{"".join(edges)}
build {LIBRARY}: link {" ".join(objects)} | {stubs}
  flags = {libraries}
"""


def write_stub(name: str, functions: dict[str, list[str]]) -> str:
    """Write the sources of a library with these functions, by version, for the linker alone. Return its edge."""
    path = f"{BUILD}/{name}"
    bodies = (f".globl {it}\n.type {it}, %function\n{it}:\n" for it in chain.from_iterable(functions.values()))
    versions = "".join(f"{version} {{ {'; '.join(them)}; }};\n" for version, them in functions.items())
    write_if_new(Path(f"{path}.s"), "".join(('.section .note.GNU-stack, "", %progbits\n.text\n', *bodies)))
    write_if_new(Path(f"{path}.versions"), versions or "{ local: *; };\n")
    flags = f"-Wl,-soname,{name},--version-script={path}.versions"
    return f"build {path}: link {path}.s | {path}.versions\n  flags = {flags}\n"


def run_ninja(text: str) -> None:
    # Look beside python first: a virtual environment that was never activated is not on PATH.
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not ninja:
        raise SystemExit(TOOLS_MISSING)
    os.makedirs(BUILD, exist_ok=True)
    Path(BUILD, "build.ninja").write_text(text)
    building, start = subprocess.Popen([ninja, "-f", f"{BUILD}/build.ninja"]), time.monotonic()
    while building.poll() is None:
        try:
            building.wait(SILENCE)
        except subprocess.TimeoutExpired:
            say(f"compiles, {time.monotonic() - start:.0f} s so far")
    if building.returncode:
        raise SystemExit("mpkernels: the build failed; the compiler's words are above")


def build_library(cxx: list[str], cuda: toolchain.Cuda, installed: Path) -> dict[str, dict]:
    """Build the library, and write beside it what it was built from and for. Return the kernels' part of that."""
    sources = runpy.run_path("mpkernels/_sources.py")["fingerprint"](Path())  # before a source is edited meanwhile
    run_ninja(ninja_file(shlex.join(cxx), cuda))
    compiler = toolchain.ask(*cxx, "--version")[1].splitlines()[0]
    info = {
        "cpu": {"built_for": [*toolchain.ISAS], "compiler": compiler, "left_out": ""},
        "cuda": {"built_for": cuda.built_for, "compiler": cuda.compiler, "left_out": cuda.left_out},
    }
    os.makedirs(installed.parent, exist_ok=True)
    installed.unlink(missing_ok=True)  # not overwritten: a running process may have mapped the old library
    shutil.copy(LIBRARY, installed)
    installed.with_name("_build_info.json").write_text(json.dumps({"sources": sources} | info, indent=2) + "\n")
    return info


class BuildNative(build_ext.build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # without CPython's tag, because it uses only the stable ABI

    def run(self) -> None:
        cxx = toolchain.find_cxx()
        cuda = toolchain.find_cuda(cxx)
        what = f"CUDA kernels with {cuda.compiler}, some 3 minutes of one core" if cuda.compile else "no CUDA kernels"
        say(f"compiles CPU kernels with {shlex.join(cxx)}, some 1 minute of one core; {what}")
        start = time.monotonic()
        info = build_library(cxx, cuda, Path(self.get_ext_fullpath("mpkernels._native")))
        for part, it in info.items():
            built = f"built for {', '.join(it['built_for'])} with {it['compiler']}"
            outcome = f"left out: {it['left_out']}" if it["left_out"] else built
            say(f"{part.upper()} kernels: {outcome}{cuda.note * (part == 'cuda')}")
        say(f"built in {time.monotonic() - start:.0f} s")


def say(text: str) -> None:
    print(f"mpkernels: {text}", flush=True)


def build_wheel(directory: str, settings: dict | None = None, metadata: str | None = None) -> str:
    toolchain.SETTINGS.update(settings or {})
    return build_meta.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: dict | None = None, metadata: str | None = None) -> str:
    toolchain.SETTINGS.update(settings or {})
    return build_meta.build_editable(directory, settings, metadata)


class Build(build.build):
    # Compile first, so that a build without a compiler fails before it copies anything.
    sub_commands = sorted(build.build.sub_commands, key=lambda command: command[0] != "build_ext")


class AnyPythonWheel(bdist_wheel.bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    sources = sorted(map(str, Path("csrc").rglob("*.[ch]*")))
    native = setuptools.Extension("mpkernels._native", sources, depends=["toolchain.py"])
    shutil.rmtree("build/lib", ignore_errors=True)  # else a module deleted since the last build would be shipped
    commands = {"build": Build, "build_ext": BuildNative, "bdist_wheel": AnyPythonWheel}
    # With package_dir, an editable install puts the checkout on sys.path. Without, it adds a hook, which comes after a
    # folder of the name mpkernels in the current one, such as the checkout's own.
    options = {"build": {"build_lib": "build/lib"}}
    setuptools.setup(ext_modules=[native], cmdclass=commands, options=options, package_dir={"": "."})
