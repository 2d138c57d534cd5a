"""Builds the CUDA kernels for the CPU: g++ compiles every *_cuda.cu with include/ in place of CUDA's headers."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"

# The checks report to undefined.cpp. NaN to integer counts, too: CUDA and the CPU convert it differently.
CHECKS = "alignment,null,bounds,signed-integer-overflow,shift,integer-divide-by-zero,float-cast-overflow"
FLAGS = [
    "-DMPK_CUDA",
    "-DMPK_EMULATION",
    f"-I{HERE / 'include'}",
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to change stacks
    f"-fsanitize={CHECKS}",
    "-fno-sanitize-recover=all",
]
KERNEL_FLAGS = ["-fsanitize=thread", "-g1"]  # memory.cpp sees every load and store; a report leads to its line
LAUNCHER_FLAGS = ["-O1"]  # compile in three quarters of the time; little of the running time is spent in launchers


def build(directory: Path, csrc: Path = CSRC) -> Path:
    """Compile every *_cuda.cu and *_torch.cpp into directory/mpkernels_emulated-<hash>.so, unless it is there."""
    compiler = find_compiler()
    kernels = sorted(csrc.rglob("*_cuda.cu"))
    if not kernels:
        raise FileNotFoundError(f"emulation: no *_cuda.cu in {csrc}")
    # If several objects define an inline function, the linker keeps the first copy. The emulation's own objects come
    # first, because their accesses aren't to be checked, then those of kernels.
    sources = [*sources_with("runtime"), *kernels, *sorted(csrc.rglob("*_torch.cpp"))]
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"mpkernels_emulated-{fingerprint(compiler, csrc)}.so"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if pytest's workers come at the same time, one builds for all
        if library.exists():
            return library
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            built = _link(compiler, compile_all(compiler, sources, csrc, Path(scratch)))
            built.replace(library)  # in one go: a build that breaks off must not leave half a library
    return library


def sources_with(runtime: str) -> list[Path]:
    """Return the emulation's sources, with one of its two runtimes. With ``on_streams``, torch makes products."""
    others = {"runtime": ("on_streams",), "on_streams": ("runtime", "products")}[runtime]
    return [path for path in sorted(HERE.glob("*.cpp")) if path.stem not in others]


def find_compiler() -> list[str]:
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    for candidate in candidates:
        if shutil.which(candidate.split()[0]):
            return candidate.split()
    raise FileNotFoundError(f"emulation: needs a C++ compiler, found none of: {', '.join(candidates)} ($CXX chooses)")


def fingerprint(compiler: list[str], csrc: Path) -> str:
    digest = hashlib.sha256(_run([*compiler, "--version"]).encode())
    for root in (csrc, HERE):
        for path in sorted(p for p in root.rglob("*") if p.suffix in {".cu", ".cuh", ".cpp", ".h", ".py"}):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_all(compiler: list[str], sources: list[Path], csrc: Path, scratch: Path) -> list[Path]:
    def compile_one(source: Path) -> Path:
        compiled = scratch / f"{source.name}.o"
        is_launcher = source.name.endswith("_torch.cpp")
        flags = [*FLAGS, *(KERNEL_FLAGS if source.suffix == ".cu" else LAUNCHER_FLAGS if is_launcher else [])]
        includes = f"-I{csrc}", f"-I{CSRC}"  # products.cpp reads matrices as kernels do, whichever are compiled
        _run([*compiler, *flags, *includes, "-x", "c++", "-c", str(source), "-o", str(compiled)])
        return compiled

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def _link(compiler: list[str], objects: list[Path]) -> Path:
    """Link against an empty libtorch.so: only its name is recorded, and `import torch` has loaded the real one."""
    scratch = objects[0].parent
    stub, library = scratch / "libtorch.so", scratch / "mpkernels_emulated.so"
    _run([*compiler, "-shared", "-Wl,-soname,libtorch.so", "-x", "c++", "/dev/null", "-o", str(stub)])
    names = "aoti_torch_empty_strided", "torch_call_dispatcher"
    wrapped = [f"-Wl,--wrap={name}" for name in names]  # runtime.cpp and products.cpp define the wrappers
    _run([*compiler, "-shared", *map(str, objects), *wrapped, "-Wl,--no-as-needed", str(stub), "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"emulation: {' '.join(command)}\n{done.stdout}")
    return done.stdout
