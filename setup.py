"""Builds mpkernels/_native.so with ninja. Everything else about the package is in pyproject.toml.

The C++ declares the few functions of torch's stable ABI that it calls. So the build never looks for a torch,
and one library serves every torch and every Python that pyproject.toml admits.
"""

import ctypes
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import setuptools

TOOLS_MISSING = "mpkernels: to build without isolation, first run: pip install -U 'setuptools>=77' ninja"
if int(setuptools.__version__.partition(".")[0]) < 77:  # an older one misreads pyproject.toml
    raise SystemExit(TOOLS_MISSING)

from setuptools.command import bdist_wheel, build, build_ext  # noqa: E402

# Contraction is off for both compilers: only then can kernels agree bit for bit.
NVCC_FLAGS = (
    "--threads 4 -Xfatbin -compress-all -DMPK_CUDA --fmad=false -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off"
)
CXX_FLAGS = "-fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-psabi -Werror=unused-result"
COMMON_FLAGS = "-std=c++17 -O3 -I csrc"
# Chip -> the virtual chip that its code is compiled for. For sm_90, compute_80 and compute_90 give equal instructions.
ARCHS = {"75": "75", "80": "80", "90": "80", "100": "100", "120": "100"}
ISAS = {"baseline": ""}
if platform.machine() in ("x86_64", "AMD64"):
    CXX_FLAGS += " -DMPK_X86"
    ISAS |= {"avx2": "-march=x86-64-v3", "avx512": "-march=x86-64-v4 -mprefer-vector-width=512"}

TOOLKITS = Path("/usr/local")  # where NVIDIA's installers put them
BUILD = "build/native"
LIBRARY = f"{BUILD}/_native.so"


class Cuda(NamedTuple):
    left_out: str = ""  # why there are no CUDA kernels; then all else is empty
    note: str = ""
    compiler: str = ""
    built_for: tuple[str, ...] = ()
    compile: str = ""
    includes: str = ""
    libraries: str = ""


def ask(*command: str) -> tuple[bool, str]:
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return run.returncode == 0, run.stdout.strip()


def find_cxx() -> list[str]:
    cxx = shlex.split(os.environ.get("CXX", "")) or [*filter(shutil.which, ("c++", "g++", "clang++"))][:1]
    if not cxx or not shutil.which(cxx[0]):
        raise SystemExit(
            f"mpkernels: {f'CXX names {cxx[0]}, which is not there' if cxx else 'no C++ compiler found'}. "
            "Install one: `apt install g++` on Debian or Ubuntu, `dnf install gcc-c++` on Fedora, "
            "`xcode-select --install` on macOS; on Windows work in WSL."
        )
    widest = [*ISAS.values()][-1]
    works, complaint = ask(*cxx, *f"{CXX_FLAGS} {widest} -fsyntax-only -x c++ {os.devnull}".split())
    if not works:
        raise SystemExit(f"mpkernels needs GCC 11, Clang 12 or newer. {shlex.join(cxx)} says:\n{complaint}")
    return cxx


def find_cuda(cxx: list[str]) -> Cuda:
    named = [f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    others = sorted(map(str, TOOLKITS.glob("cuda-*/bin/nvcc")), key=_numbers, reverse=True)
    paths = filter(None, map(shutil.which, (*named, "nvcc", f"{TOOLKITS}/cuda/bin/nvcc", *others)))
    left_out = []
    for nvcc in dict.fromkeys(paths):
        cuda = ask_nvcc(nvcc, cxx)
        if cuda.compile:
            return cuda
        left_out.append(cuda.left_out)  # try the next: a distribution's old nvcc often hides a newer one
    return Cuda("; ".join(dict.fromkeys(left_out)) or "no nvcc found")


def _numbers(text: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", text))]


def driver_version() -> tuple[int, int] | None:
    """Return the CUDA version that this machine's driver was made for. None without a driver, as in image builds."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed or not version.value else (version.value // 1000, version.value % 1000 // 10)


def ask_nvcc(nvcc: str, cxx: list[str]) -> Cuda:
    release = re.search(r"release (\d+)\.(\d+)", ask(nvcc, "--version")[1])
    if not release or (int(release[1]), int(release[2])) < (12, 1):  # since 12.1 a kernel may have 32 KB of parameters
        return Cuda(f"{nvcc} is {release[0] if release else 'broken'}, CUDA 12.1 or newer is needed")
    version, driver = f"{release[1]}.{release[2]}", driver_version()
    if driver and driver[0] < int(release[1]):
        return Cuda(
            f"{nvcc} is of CUDA {version}, whose programs the driver that is here, made for CUDA "
            f"{driver[0]}.{driver[1]}, can't run: update the driver, or install a CUDA toolkit {driver[0]}.x"
        )
    supported = ask(nvcc, "--list-gpu-arch")[1].split()
    archs = {arch: virtual for arch, virtual in ARCHS.items() if f"compute_{arch}" in supported}
    if not archs:
        return Cuda(f"{nvcc} knows none of the chips {', '.join(ARCHS)}")
    named = [word for word in cxx if not word.startswith("-") and shutil.which(word)]
    host, complaint = find_host(nvcc, named[-1])  # g++ in "ccache g++ -m64 -I include"
    if complaint:
        return Cuda(f"{nvcc} works with no C++ compiler that is here: {complaint}")
    # nvcc may be a script that calls another; the dry run tells where the real one keeps its files.
    dryrun = ask(nvcc, "-ccbin", host, "--dryrun", "-x", "cu", "-c", os.devnull)[1]
    found = dict(re.findall(r"^#\$ (INCLUDES|LIBRARIES)=(.*)$", dryrun, re.MULTILINE))
    includes, libraries = found.get("INCLUDES", ""), found.get("LIBRARIES", "")
    if not any(Path(flag[2:], "libcudart_static.a").exists() for flag in shlex.split(libraries)):
        return Cuda(f"{nvcc} has no libcudart_static.a")
    codes = {virtual: [f"sm_{arch}" for arch, it in archs.items() if it == virtual] for virtual in archs.values()}
    newest = [*codes][-1]
    codes[newest].append(f"compute_{newest}")  # PTX, which a driver translates for later chips
    flags = [f"-gencode 'arch=compute_{virtual},code=[{','.join(chips)}]'" for virtual, chips in codes.items()]
    is_newer = driver is not None and driver < (int(release[1]), int(release[2]))
    return Cuda(
        # Within one major version an older driver runs the code, but doesn't translate a newer compiler's PTX.
        note=f", for the driver is older: only on {', '.join(f'sm_{it}' for it in archs)} and their like" * is_newer,
        compiler=f"nvcc {version}",
        built_for=tuple(chain.from_iterable(codes.values())),
        compile=f"{shlex.join([nvcc, '-ccbin', host])} {NVCC_FLAGS} {' '.join(flags)}",
        includes=f"-DMPK_CUDA {includes}",
        # Static, because torch brings a cudart of whichever major version it was built with.
        libraries=f"{libraries} -lcudart_static -ldl -lrt -lpthread",
    )


def find_host(nvcc: str, cxx: str) -> tuple[str, str]:
    """Return a C++ compiler that nvcc accepts, or "" and its complaints: an nvcc refuses compilers newer than itself.
    This compiles a file, because a dry run doesn't check the compiler."""
    complaints = []
    with tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch, "nothing.cu"), Path(scratch, "nothing.o")
        source.write_text("#include <cmath>\n#include <cuda_runtime.h>\n__global__ void nothing() {}\n")
        for host in filter(shutil.which, dict.fromkeys((cxx, "g++-14", "g++-13", "g++-12"))):
            works, said = ask(nvcc, "-ccbin", host, "-std=c++17", "-c", str(source), "-o", str(built))
            if works:
                return host, ""
            lines = said.splitlines() or ["nothing"]
            complaints.append(f"with {host} it says {next((it for it in lines if 'error' in it), lines[-1])}")
    return "", "; ".join(complaints)


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
def ninja_file(cxx: str, cuda: Cuda) -> str:
    objects, edges = [], []

    def add(sources: str, command: str, variant: str = "") -> None:
        for source in sorted(Path("csrc").rglob(sources)):
            objects.append(f"{BUILD}/{source.stem}{variant}.o")
            edges.append(f"build {objects[-1]}: compile {source} | {objects[-1]}.by\n  compile = {command}\n")
            write_if_new(Path(f"{objects[-1]}.by"), f"{command} {COMMON_FLAGS}\n")

    if cuda.compile:
        add("*_cuda.cu", cuda.compile)
    add("*_torch.cpp", f"{cxx} {CXX_FLAGS} {cuda.includes}")
    # The linker keeps the first copy of an inline function that several objects have. So the widest instruction set
    # comes last: its copies must not end up in code that every CPU runs.
    for isa, flags in ISAS.items():
        add("*_cpu.cpp", f"{cxx} {CXX_FLAGS} {flags} -DMPK_ISA={isa}", f".{isa}")

    stub, libraries = "", "-undefined dynamic_lookup"
    if sys.platform != "darwin":
        # Weak references find libtorch.so only if DT_NEEDED names it; an empty library of that name will do.
        stub = f"{BUILD}/libtorch.so"
        libraries = f"-Wl,--no-as-needed {stub} {cuda.libraries}"
        edges.append(f"build {stub}: link\n  flags = -Wl,-soname,libtorch.so -x c++ {os.devnull}\n")
    return f"""\
builddir = {BUILD}
pool memory
  depth = {jobs_in_memory()}
rule compile
  description = compiles $in
  command = $compile {COMMON_FLAGS} -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  generator = 1
  pool = memory
rule link
  command = {cxx} -shared -o $out $in $flags
{"".join(edges)}
build {LIBRARY}: link {" ".join(objects)} | {stub}
  flags = {libraries}
"""


def run_ninja(text: str) -> None:
    # Look beside python first: a virtual environment that was never activated is not on PATH.
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not ninja:
        raise SystemExit(TOOLS_MISSING)
    os.makedirs(BUILD, exist_ok=True)
    Path(BUILD, "build.ninja").write_text(text)
    if subprocess.run([ninja, "-f", f"{BUILD}/build.ninja"]).returncode:
        raise SystemExit("mpkernels: the build failed; the compiler's words are above")


def build_library(cxx: list[str], cuda: Cuda, installed: Path) -> dict[str, dict]:
    """Build the library, and write beside it what it was built from and for. Return the kernels' part of that."""
    sources = runpy.run_path("mpkernels/_sources.py")["fingerprint"](Path())  # before a source is edited meanwhile
    run_ninja(ninja_file(shlex.join(cxx), cuda))
    info = {
        "cpu": {"built_for": [*ISAS], "compiler": ask(*cxx, "--version")[1].splitlines()[0], "left_out": ""},
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
        cxx = find_cxx()
        cuda = find_cuda(cxx)
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


class Build(build.build):
    # Compile first, so that a build without a compiler fails before it copies anything.
    sub_commands = sorted(build.build.sub_commands, key=lambda command: command[0] != "build_ext")


class AnyPythonWheel(bdist_wheel.bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    native = setuptools.Extension("mpkernels._native", sorted(map(str, Path("csrc").rglob("*.[ch]*"))))
    shutil.rmtree("build/lib", ignore_errors=True)  # else a module deleted since the last build would be shipped
    commands = {"build": Build, "build_ext": BuildNative, "bdist_wheel": AnyPythonWheel}
    # An editable install puts the checkout on sys.path. By setuptools' default it would come after a folder of the name
    # mpkernels in the current one, such as the checkout's own.
    options = {"build": {"build_lib": "build/lib"}, "editable_wheel": {"mode": "compat"}}
    setuptools.setup(ext_modules=[native], cmdclass=commands, options=options)
