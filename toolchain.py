"""Finds the compilers, and says with which flags each of them compiles what."""

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

# Contraction is off for both compilers: only then can kernels agree bit for bit.
NVCC_FLAGS = (
    "--threads 4 -Xfatbin -compress-all -DMPK_CUDA --fmad=false -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off"
)
CXX_FLAGS = "-fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-psabi -Werror=unused-result"
COMMON_FLAGS = "-std=c++17 -O3 -I csrc"
# Chip -> the virtual chip that its code is compiled for. For sm_90, compute_80 and compute_90 give equal instructions.
ARCHS = {"75": "75", "80": "80", "90": "80", "100": "100", "120": "100"}
ISAS = {"baseline": ""}
# Python's own variable names another machine than this one, where a cross compiler builds.
if os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).endswith(("x86_64", "AMD64")):
    CXX_FLAGS += " -DMPK_X86"
    ISAS |= {"avx2": "-march=x86-64-v3", "avx512": "-march=x86-64-v4 -mprefer-vector-width=512"}

GLIBC = 2, 28  # a library that needs no more runs on every Linux since 2018 (manylinux_2_28)
SETTINGS: dict[str, str] = {}  # pip's --config-settings
TOOLKITS = Path("/usr/local")  # where NVIDIA's installers put them


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
    if wanted := SETTINGS.get("cuda"):
        if wanted != "no":
            raise SystemExit(f"mpkernels: --config-settings=cuda={wanted} is unknown; cuda=no leaves CUDA kernels out")
        return Cuda("--config-settings=cuda=no")
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


def older_functions(cxx: str) -> dict[str, list[str]]:
    """Return, by an allowed version, the functions that this machine's glibc has in that version and in a newer one,
    which would be linked."""
    versions: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    objdump, *libraries = (
        ask(*shlex.split(cxx), f"-print-{it}")[1]
        for it in ("prog-name=objdump", "file-name=libc.so.6", "file-name=libm.so.6")
    )
    table = ask(objdump, "-T", *libraries)[1] if shutil.which(objdump) else ""
    for version, name in re.findall(r" \.text.* \(?GLIBC_([\d.]+)\)? +(\w+)$", table, re.MULTILINE):
        versions[name].add(tuple(_numbers(version)))
    older = defaultdict(list)
    for name, them in versions.items():
        allowed = [it for it in them if it <= GLIBC]
        if allowed and max(them) > GLIBC:
            older[f"GLIBC_{'.'.join(map(str, max(allowed)))}"].append(name)
    return older
