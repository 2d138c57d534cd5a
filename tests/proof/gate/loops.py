"""Counts the instructions of the loops in which kernels run through memory: what an element costs a thread.

The shortest way that reads and writes all packs of a loop counts, because other branches lead to what is rare, such as
roots of subnormal numbers, single elements, or threads of a warp that have come apart.
"""

import re
import shlex
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

import toolchain
from tests.proof.gate import measure
from tests.proof.gate.limits import Kernels, Numbers

CHIP = "90"  # an H100's and an H200's
JUMP = re.compile(r"(@\S+ +|(?=BRA\.DIV))?\bBRA\b.*`\((\.L_x_\d+)\)")  # the first group is None if all jump


class Loop(NamedTuple):
    """One of a kernel's innermost loops. It is known by the bytes that a thread reads and writes in a round and, where
    these are equal, by a struct that some of its instructions come from. If several look alike, the shortest counts."""

    title: str  # in the table and in docs/performance.md
    source: str
    kernel: str
    moved: float  # bytes an element
    read: int
    written: int
    elements: int = 8  # of a round
    struct: str = ""


def _of_passes() -> Iterator[Loop]:
    """Yield the passes over bf16 matrices beside products; fp16's cost the same."""
    act, gated = "linear/linear_act_cuda.cu", "linear/linear_gated_cuda.cu"
    backward = "act_backward_kernel<mpk::bf16, 8, true, {}>"
    for name, struct in {"gelu": "Gelu", "gelu_tanh": "GeluTanh", "silu": "Silu", "relu2": "Relu2"}.items():
        yield Loop(name, act, "act_kernel<mpk::bf16, 8>", 4, 16, 16, struct=struct)
        yield Loop(f"{name}, backward", act, backward.format("false"), 6, 32, 16, struct=struct)
        yield Loop(f"{name}, backward, y anew", act, backward.format("true"), 8, 32, 32, struct=struct)
    for name, struct in {"sigmoid": "Sigmoid", "tanh": "Tanh"}.items():
        yield Loop(name, act, "act_kernel<mpk::bf16, 8>", 4, 16, 16, struct=struct)
        yield Loop(f"{name}, backward", act, backward.format("false"), 6, 32, 16, struct=struct)
    for name, struct in {"silu": "Silu", "gelu": "Gelu"}.items():
        yield Loop(f"{name}, gated", gated, "linear_gated_kernel<mpk::bf16, 8>", 6, 32, 16, struct=struct)
        yield Loop(
            f"{name}, gated, backward, h anew",
            gated,
            "linear_dgated_kernel<mpk::bf16, 8, true>",
            12,
            48,
            48,
            struct=struct,
        )


def _of_steps() -> Iterator[Loop]:
    for parameters, needs, moved, read, written in (
        ("fp32", 0, 28, 128, 96),
        ("bf16, split masters", 0, 26, 112, 96),
        ("bf16, split masters, bf16 moments", 0, 18, 80, 64),
        # 8 bytes are scales, which few threads use; 80 or 64, and 32, are those of packs that are stepped anew.
        ("fp32, 8-bit moments", 1, 16, 168, 88),
        ("bf16, split masters, 8-bit moments", 1, 14, 136, 88),
    ):
        kernel = f"step_kernel<mpk::Adamw, (mpk::Needs){needs}>"
        yield Loop(f"AdamW, {parameters}", "step/rules/adamw_cuda.cu", kernel, moved, read, written)


LOOPS = (*_of_passes(), *_of_steps())
SOURCES = sorted({it.source for it in LOOPS})


class Code(NamedTuple):
    """A loop as it was compiled, and what one thread does in a round."""

    instructions: float  # inf where no way does all
    read: int  # bytes
    written: int
    structs: set[str]


def count(command: str, source: str) -> Kernels:
    """Return what the loops of a source cost. It is compiled once more, with the line of each instruction; that changes
    no instruction."""
    command = re.sub(r"-gencode '.*?'", "", f"{command} {toolchain.COMMON_FLAGS} -cubin -lineinfo")
    command += f" -gencode arch=compute_{toolchain.ARCHS[CHIP]},code=sm_{CHIP}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        measure.output(*shlex.split(command), f"csrc/{source}", "-o", cubin.name)
        compiled = {
            measure.demangled(name): [*innermost(listing)]
            for name, listing in measure.listings(cubin.name, "-gi").items()
        }
    return {(it.title, f"sm_{CHIP}"): _numbers(it, compiled[it.kernel]) for it in LOOPS if it.source == source}


def _numbers(loop: Loop, compiled: list[Code]) -> Numbers:
    round_ = loop.read, loop.written
    alike = [it.instructions for it in compiled if (it.read, it.written) == round_ and loop.struct in it.structs]
    if not alike:
        raise ValueError(f"{loop}: none of the kernel's loops looks like this: {compiled}")
    return {"instructions": min(alike), "elements": loop.elements, "moved": loop.moved}


def innermost(listing: str) -> Iterator[Code]:
    """Yield a kernel's loops that hold no other loop. What jumps back into a loop from behind looks like one, too."""
    texts, labels = [""], {}  # an instruction with what stands before it: the lines of sources that it comes from
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(texts) - 1
        texts[-1] += line + "\n"
        if measure.INSTRUCTION.search(line):
            texts.append("")
    jumps = [JUMP.search(text) for text in texts]
    targets = [labels[jump[2]] if jump else i + 1 for i, jump in enumerate(jumps)]
    following = [{targets[i]} if jump and jump[1] is None else {targets[i], i + 1} for i, jump in enumerate(jumps)]
    loops = [range(target, i + 1) for i, target in enumerate(targets) if target < i]
    for loop in loops:
        if not any(it != loop and it[0] in loop and it[-1] in loop for it in loops):
            accesses = [i for i in loop if re.search(r"\b(LDG|STG)\S*\.(64|128)\b", texts[i])]
            stations = [loop[0], *accesses, loop[-1]]
            ways = (_shortest_way(*ends, following) for ends in pairwise(stations))
            yield _code("".join(texts[loop.start : loop.stop]), 1 + sum(ways))


def _code(text: str, instructions: float) -> Code:
    names = measure.INSTRUCTION.findall(text)
    read, written = (sum(_bytes(it) for it in names if it.startswith(way)) for way in ("LDG", "STG"))
    places = re.findall(r'File "([^"]*/csrc/[^"]*)", line (\d+)', text)
    return Code(instructions, read, written, {_structs(path)[int(line) - 1] for path, line in places} | {""})


def _shortest_way(start: int, end: int, following: list[set[int]]) -> float:
    """Return by how many instructions one comes from one to another."""
    reached, seen, count = {start}, {start}, 0
    while reached and end not in reached:
        reached = set[int]().union(*(following[i] for i in reached)) - seen
        seen, count = seen | reached, count + 1
    return count if reached else inf


def _bytes(access: str) -> int:
    width = re.search(r"\.[SU]?(8|16|64|128|256)\b", access)
    return int(width[1]) // 8 if width else 4


@cache
def _structs(path: str) -> list[str]:
    """Return the name of the struct around each line of a source."""
    begins = (re.match(r"(?:struct|class) (\w+)|}", line) for line in Path(path).read_text().splitlines())
    return [*accumulate(begins, lambda name, found: name if found is None else found[1] or "", initial="")][1:]
