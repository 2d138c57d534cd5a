"""Does a warp-specialised kernel release a buffer that a wgmma still reads, as facebookexperimental/triton#1278 has it?

PTX is followed along the ways that matter, with real numbers: in at each partition's loop, many times around it, out to
the next tile and around again. What depends on arguments stays unknown; where buffers and barriers lie does not.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.proof.gate.ptx_arithmetic import Registers

ROUNDS = 12  # beyond the buffers of any ring
MULTIPLY = "wgmma.mma_async"
COPY = "cp.async.bulk.tensor"
RELEASE = r"mbarrier\.arrive\.(?!expect_tx)\S+ _, \[([^]]+)\]"
REFILL = r"cp\.async\.bulk\.tensor\.\S+\.shared::\w+\.global\S* \[([^]]+)\]"
AWAIT = r"mbarrier\.try_wait\.\S+ \w+, \[([^]]+)\]"
DESCRIPTORS = r"\}, (%rd\d+|\{[^}]*\}), (%rd\d+)"  # of what a wgmma multiplies; the first may be in registers
JUMP = r"(@\S+ )?(bra|ret|exit|trap)\b\S*(?: (\$L\w+))?"
NOT_CODE = re.compile(
    r"//[^\n]*|^\s*\.(loc|reg|pragma)\b[^\n]*|\bwaitLoop:|@!complete bra\.uni waitLoop;", re.MULTILINE
)

Number = int | None  # that isn't known


class Block(NamedTuple):
    statements: list[str]
    next: list[int]


def refuse_early(ptx: str) -> None:
    if complaints := early_releases(ptx):
        raise ValueError(f"shared memory may be overwritten while it is read: {'; '.join(complaints)}")


def early_releases(ptx: str) -> list[str]:
    """Return a line for each release of a buffer that a wgmma may still read, or of which this can't be told."""
    if MULTIPLY not in ptx or not re.search(RELEASE, ptx):
        return []  # no partition waits for another
    blocks = _blocks(ptx)
    buffers: dict[Number, set[Number]] = {}  # by the barrier at which a copy waits until it may refill them
    for path in _paths(blocks, COPY):
        for barrier, buffer in _refills(path):
            buffers.setdefault(barrier, set()).add(buffer)
    paths = [*_paths(blocks, MULTIPLY)]
    followed = {statement for path in paths for statement in path}
    releases = [it for block in blocks for it in block.statements if re.search(RELEASE, it)]
    complaints = [f"not on a way around a wgmma: {it!r}" for it in releases if it not in followed]
    for path in paths:
        complaints += _releases(path, buffers)
    return list(dict.fromkeys(complaints))


def _blocks(ptx: str) -> list[Block]:
    code = NOT_CODE.sub("", ptx[ptx.index("{", ptx.index(".entry")) : ptx.rindex("ret;") + 4])
    numbers: dict[str, int] = {}
    found: list[list[str]] = [[]]
    for part in re.split(r";|(?<=:)\s*\n|\n(?=\$L)", code):
        statement = " ".join(part.split()).lstrip("{} ")
        if label := re.fullmatch(r"(\$L\w+):", statement):
            numbers[label[1]] = len(found)
            found.append([])
        elif statement:
            found[-1].append(statement)
            if re.match(JUMP, statement):
                found.append([])
    blocks = []
    for number, statements in enumerate(found):
        jump = re.match(JUMP, statements[-1]) if statements else None
        targets = [numbers[jump[3]]] if jump and jump[3] else []
        falls_through = (not jump or jump[1]) and number + 1 < len(found)
        blocks.append(Block(statements, [*targets, *([number + 1] if falls_through else [])]))
    return blocks


def _paths(blocks: list[Block], instruction: str) -> Iterator[list[str]]:
    """Yield, for each block with an instruction, statements as they are executed."""
    for target, block in enumerate(blocks):
        if any(instruction in statement for statement in block.statements):
            around = _way(blocks, block.next, target)
            exits = [
                [*around[:i], *_way(blocks, [it], target)]
                for i, last in enumerate([target, *around[:-1]])
                for it in blocks[last].next
                if it not in around
            ]
            outside = min((it for it in exits if target in it), key=len, default=[])
            path = [*_way(blocks, [0], target), *around * ROUNDS, *outside, *around * ROUNDS]
            yield [statement for number in path for statement in blocks[number].statements]


def _way(blocks: list[Block], starts: Sequence[int], target: int) -> list[int]:
    """Return the shortest way from one of some blocks to another, with both; nothing if there is none."""
    ways, been = [[start] for start in starts], set(starts)
    for way in ways:  # and those that are added meanwhile
        if way[-1] == target:
            return way
        ways += [[*way, it] for it in blocks[way[-1]].next if it not in been]
        been.update(blocks[way[-1]].next)
    return []


def _refills(path: list[str]) -> Iterator[tuple[Number, Number]]:
    """Yield each barrier at which the path waits, with the buffer that it fills next."""
    registers, awaited = Registers(), list[Number]()
    for statement in path:
        registers.execute(statement)
        if barrier := re.search(AWAIT, statement):
            awaited.append(registers.value(barrier[1]))
        elif buffer := re.search(REFILL, statement):
            yield from ((barrier, registers.value(buffer[1])) for barrier in awaited)
            awaited.clear()


def _releases(path: list[str], buffers: dict[Number, set[Number]]) -> Iterator[str]:
    """Yield what is wrong with releases. One thread releases for all: they must have met since each waited."""
    registers = Registers()
    begins = sorted(begin for each in buffers.values() for begin in each if begin is not None)
    groups: list[set[Number]] = [set()]  # what each group of wgmma reads; the last is not committed yet
    finished: list[set[Number]] = []  # of these, those that are over for this thread
    for statement in path:
        registers.execute(statement)
        if MULTIPLY in statement:
            groups[-1] |= {max((it for it in begins if it <= at), default=None) for at in _read(statement, registers)}
        elif "wgmma.commit_group" in statement:
            groups.append(set())
        elif wait := re.search(r"wgmma\.wait_group\S* (\d+)", statement):
            over = max(len(groups) - 1 - int(wait[1]), 0)
            finished, groups = finished + groups[:over], groups[over:]
        elif re.match(r"(bar|barrier)(\.cta)?\.sync", statement):
            finished = []
        elif barrier := re.search(RELEASE, statement):
            released = buffers.get(registers.value(barrier[1]), {None})
            if None in released.union(*groups, *finished):
                yield f"can't tell what is released: {statement!r}"
            elif released & set().union(*groups):
                yield f"released before its wgmma is over: {statement!r}"
            elif released & set().union(*finished):
                yield f"released before its wgmma is over in other warps: {statement!r}"


def _read(multiply: str, registers: Registers) -> list[int]:
    """Return the addresses in shared memory that a wgmma reads from: -1, which is before all buffers, if not known."""
    descriptors = re.search(DESCRIPTORS, multiply)
    values = [registers.value(it) for it in descriptors.groups() if it[0] == "%"] if descriptors else [None]
    return [-1 if value is None else (value & 0x3FFF) << 4 for value in values]
