"""Measures the machine code that compilers make of the kernels."""

import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from triton import compile, knobs
from triton.runtime import driver

import setup
import toolchain
from tests.proof.gate.launches import TARGETS, Launch, NoGpu
from tests.proof.gate.limits import BOUNDED, KEPT, Kernels, Numbers

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?\s*([A-Z]\S*)")
WAIT = re.compile(r"\bWARPGROUP\.DEPBAR\.LE gsb\d, (0x[0-9a-f]+)|\b(BAR\.SYNC)\b|\bUTMALDG\b")


def triton(launch: Launch) -> Kernels:
    driver.set_active(NoGpu(launch.chip))  # kernels ask for the chip by triton.language.target_info
    compiled = compile(launch.source, target=TARGETS[launch.chip], options=launch.options)
    if "cubin" not in compiled.asm:
        return {}  # for AMD's chips, on which nobody has run a kernel, kernels must only compile
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(compiled.asm["cubin"])
        (numbers,) = _cubin_numbers(cubin.name).values()
    return {(launch.name, launch.chip): numbers | {"shared": compiled.metadata.shared}}


def cuda(command: str, source: Path, may_reuse: bool) -> Kernels:
    """Look at the code for each chip in the object that setup.py builds."""
    kernels = {}
    with tempfile.TemporaryDirectory() as scratch:
        built = built_before(command, source) if may_reuse else None
        if built is None:
            built = Path(scratch, f"{source.stem}.o")
            output(*shlex.split(f"{command} {toolchain.COMMON_FLAGS}"), "-c", str(source), "-o", str(built))
        output(knobs.nvidia.cuobjdump.path, "-xelf", "all", str(built.resolve()), cwd=scratch)
        for cubin in Path(scratch).glob("*.cubin"):
            chip = cubin.suffixes[-2][1:]  # unscale_cuda.1.sm_80.cubin
            for mangled, numbers in _cubin_numbers(str(cubin)).items():
                kernels[f"{source.stem}.{demangled(mangled)}", chip] = numbers
    return kernels


def built_before(command: str, source: Path) -> Path | None:
    """Return the object that a build in this checkout has left, if that was by this command and nothing has changed."""
    built, plan = Path(setup.BUILD, f"{source.stem}.o"), Path(setup.BUILD, "build.ninja")
    if not (built.exists() and plan.exists()):
        return None
    is_by_command = f"build {built}: compile {source} | {built}.by\n  compile = {command}\n" in plan.read_text()
    changed = max(it.stat().st_mtime for it in (*map(Path, ("setup.py", "toolchain.py")), *Path("csrc").rglob("*.*")))
    return built if is_by_command and built.stat().st_mtime > changed else None


def _cubin_numbers(cubin: str) -> dict[str, Numbers]:
    usage = output(knobs.nvidia.cuobjdump.path, "-res-usage", cubin)
    kernels, codes = {}, listings(cubin)
    for name, *used in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage):
        registers, stack, shared, local = map(int, used)
        instructions = INSTRUCTION.findall(codes[name])
        kernels[name] = {
            "registers": registers,
            "spills": sum(instruction.startswith(("LDL", "STL")) for instruction in instructions),
            "stack": stack + local,
            "shared": shared,  # the static part, with the 1 KB that sm_90 and later keep to themselves
            **_count(instructions),
            **waits(codes[name]),
        }
    return kernels


def waits(code: str) -> Numbers:
    """Return how many groups of a Hopper's products still run when the loop lets TMA fill a buffer again, and how many
    buffers are filled though no barrier follows a wait: other warps may still read them (triton-lang/triton#11047)."""
    left, is_guarded, in_loop, unguarded = None, True, None, 0
    for wait in WAIT.finditer(code):
        if wait[1]:
            left, is_guarded = int(wait[1], 16), False
        elif wait[2]:
            is_guarded = True
        elif left is not None:
            in_loop = left if in_loop is None else in_loop  # the loop comes before what waits for all groups
            unguarded += not is_guarded
    return {name: count for name, count in (("groups_left", in_loop), ("unguarded", unguarded)) if count}


def listings(cubin: str, *options: str) -> dict[str, str]:
    """Return the machine code of each kernel."""
    # Without its analysis of the data flow, nvdisasm is faster than cuobjdump -sass, which always does it.
    code = output(knobs.nvidia.nvdisasm.path, "-ndf", "-c", *options, cubin)
    parts = re.split(r"^\.text\.(\S+):$", code, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _count(instructions: list[str]) -> Numbers:
    counts = {
        name: sum(bool(re.match(pattern, instruction)) for instruction in instructions)
        for name, pattern in (KEPT | BOUNDED).items()
    }
    return {name: count for name, count in counts.items() if count}


def demangled(name: str) -> str:
    return output("c++filt", "-p", name).strip().removeprefix("mpk::")


def output(*command: str, cwd: str | None = None) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout
