"""What instructions do that move data, lanes, and the warp's place in the code."""

import numpy as np

from tests.proof.sass.code import Instruction, Operand
from tests.proof.sass.memory import LANES, Lanes
from tests.proof.sass.warp import Warp, meaning

SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def size_of(it: Instruction) -> int:
    return next((SIZES[one] for one in it.modifiers if one in SIZES), 4)


def _put_rows(warp: Warp, it: Instruction, result: Operand, rows: Lanes) -> None:
    """Bytes into registers, a small number with its sign where it has one."""
    size = rows.shape[1]
    if size < 4:
        kind = ("i" if {"S8", "S16"} & {*it.modifiers} else "u") + str(size)
        warp.put(result, rows.view(kind)[:, 0].astype(np.int32).view(np.uint32))
    else:
        words = np.ascontiguousarray(rows).view(np.uint32)
        warp.put(result, *(words[:, i] for i in range(size // 4)))


def _rows(warp: Warp, source: Operand, size: int) -> Lanes:
    words = [
        warp.bits(source._replace(number=source.number + i) if source.number != 255 else source)
        for i in range(max(size // 4, 1))
    ]
    return np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)[:, :size]


@meaning("LDG", "LD")
def _load(warp: Warp, it: Instruction) -> None:
    result, source = [one for one in it.operands if one.kind != "P"][:2]
    _put_rows(warp, it, result, warp.load("global", source, size_of(it)))


@meaning("LDS")
def _load_shared(warp: Warp, it: Instruction) -> None:
    _put_rows(warp, it, it.operands[0], warp.load("shared", it.operands[1], size_of(it)))


@meaning("LDSM")
def _load_matrices(warp: Warp, it: Instruction) -> None:
    """8 x 8 halves, or several: eight lanes each say where a row is, and each lane gets two neighbours; of a transposed
    matrix, two below each other."""
    count, rows = next((int(one) for one in it.modifiers if one in "24"), 1), np.arange(8)
    asking = warp.active & (np.arange(LANES) < 8 * count)
    everyone, warp.active = warp.active, asking
    bytes_of_rows = warp.load("shared", it.operands[1], 16)
    warp.active = everyone
    words = []
    for matrix in range(count):
        halves = np.ascontiguousarray(bytes_of_rows[8 * matrix + rows]).view(np.uint16)
        halves = halves.T if "MT88" in it.modifiers else halves
        words.append(np.ascontiguousarray(halves).view(np.uint32).reshape(-1))
    warp.put(it.operands[0], *words)


@meaning("LDC", "ULDC", "LDCU")
def _load_constant(warp: Warp, it: Instruction) -> None:
    _put_rows(warp, it, it.operands[0], warp.constant(it.operands[1], size_of(it)))


@meaning("STG", "ST")
def _store(warp: Warp, it: Instruction) -> None:
    warp.store("global", it.operands[0], _rows(warp, it.operands[1], size_of(it)))


@meaning("STS")
def _store_shared(warp: Warp, it: Instruction) -> None:
    warp.store("shared", it.operands[0], _rows(warp, it.operands[1], size_of(it)))


@meaning("LDL", "STL")
def _local(warp: Warp, it: Instruction) -> None:
    """Each lane's own stack, which grows down from 0."""
    memory = next(one for one in it.operands if one.kind == "memory")
    size, lanes = size_of(it), np.flatnonzero(warp.active)
    places = (warp.addresses(memory) & 0xFFFF)[:, None] + np.arange(size)
    if it.name == "LDL":
        _put_rows(warp, it, it.operands[0], np.take_along_axis(warp.stack, places, 1))
    else:
        warp.stack[lanes[:, None], places[lanes]] = _rows(warp, it.operands[1], size)[lanes]


@meaning("ATOMG", "ATOM", "RED", "REDG")
def _atomic(warp: Warp, it: Instruction) -> None:
    """Each gets what was there before; nothing is added, as if this block came first."""
    memory = next(one for one in it.operands if one.kind == "memory")
    rows = warp.load("global", memory, size_of(it))
    results = [one for one in it.operands[: it.operands.index(memory)] if one.kind == "R"]
    for result in results:
        _put_rows(warp, it, result, rows)


@meaning("SHFL")
def _shuffle(warp: Warp, it: Instruction) -> None:
    predicate, result, source, by, _ = it.operands
    lane, step = np.arange(LANES), warp.bits(by).astype(np.int64)
    target = {"BFLY": lane ^ step, "IDX": step & 31, "UP": lane - step, "DOWN": lane + step}[it.modifiers[0]]
    inside = (target >= 0) & (target < LANES)
    warp.put(result, warp.bits(source)[np.where(inside, target, lane)])
    warp.put_predicate(predicate, inside)


@meaning("REDUX", "CREDUX")
def _reduce(warp: Warp, it: Instruction) -> None:
    kind = np.int32 if "S32" in it.modifiers else np.uint32
    values = warp.bits(it.operands[1]).view(kind)[warp.active]
    join = {"MAX": np.max, "MIN": np.min, "SUM": np.sum, "OR": np.bitwise_or.reduce, "AND": np.bitwise_and.reduce}
    joined = join[next((one for one in it.modifiers if one in join), "AND")](values)
    warp.put(it.operands[0], np.full(LANES, joined, kind).view(np.uint32))


@meaning("VOTE", "VOTEU")
def _vote(warp: Warp, it: Instruction) -> None:
    registers = [one for one in it.operands if one.kind in ("R", "UR")]
    *results, source = [one for one in it.operands if one.kind in ("P", "UP")]
    value = warp.predicate(source) & warp.active
    ballot = np.uint32(sum(1 << int(lane) for lane in np.flatnonzero(value)))
    answer = {"ANY": value.any(), "ALL": value[warp.active].all(), "EQ": len({*value[warp.active]}) == 1}
    for result in registers:
        warp.put(result, np.full(LANES, ballot))
    for result in results:
        warp.put_predicate(result, np.full(LANES, answer[it.modifiers[0]]))


@meaning("BAR")
def _meet_block(warp: Warp, it: Instruction) -> None:
    """The block's warps may vote there. One that is not run is taken to vote as the others do."""
    warp.meetings += 1
    if "RED" in it.modifiers:
        if "OR" not in it.modifiers:
            raise NotImplementedError(f"no meaning for {it.text}")
        vote = bool((warp.predicate(it.operands[-1]) & warp.active).any())
        warp.shared.votes[warp.meetings] = warp.shared.votes.get(warp.meetings, False) | vote


@meaning("B2R")
def _result_of_vote(warp: Warp, it: Instruction) -> None:
    warp.put_predicate(it.operands[-1], np.full(LANES, warp.shared.votes[warp.meetings]))


@meaning("BRA", "CALL")
def _branch(warp: Warp, it: Instruction) -> None:
    lanes = warp.active
    conditions = [one for one in it.operands if one.kind in ("P", "UP")]
    for condition in conditions:
        lanes = lanes & warp.predicate(condition)
    if "DIV" in it.modifiers and np.array_equal(warp.active, warp.alive):
        return
    warp.at[lanes] = int(it.operands[-1].value)


@meaning("RET")
def _return(warp: Warp, it: Instruction) -> None:
    warp.at[warp.active] = warp.bits(it.operands[0])[warp.active]


@meaning("BRX", "BRXU")
def _jump(warp: Warp, it: Instruction) -> None:
    """Relative to the next instruction."""
    base, offset = it.operands[0], it.operands[-1].value
    offset = int(offset) - (1 << 64) if int(offset) >> 63 else int(offset)
    target = warp.at + warp.bits(base).view(np.int32) + offset
    warp.at[warp.active] = target[warp.active]


@meaning("BSSY")
def _will_meet(warp: Warp, it: Instruction) -> None:
    warp.meets[it.operands[0].number] = warp.active.copy()


@meaning("BREAK")
def _will_not_meet(warp: Warp, it: Instruction) -> None:
    number = it.operands[-1].number
    warp.meets[number] = warp.meets[number] & ~warp.active
    _release(warp, number)


@meaning("BSYNC")
def _meet(warp: Warp, it: Instruction) -> None:
    number = it.operands[0].number
    warp.waits_at[warp.active] = number
    _release(warp, number)


def _release(warp: Warp, number: int) -> None:
    waits = warp.waits_at == number
    if not (warp.meets[number] & warp.alive & ~waits).any():
        warp.waits_at[waits] = -1


@meaning("BMOV")
def _keep_meeting(warp: Warp, it: Instruction) -> None:
    """Into a register, a bit for each lane, or back: a function may need the barrier."""
    result, source = it.operands
    if result.kind == "R":
        lanes = warp.meets.get(source.number, np.zeros(LANES, bool))
        warp.put(result, np.full(LANES, np.uint32(sum(1 << int(lane) for lane in np.flatnonzero(lanes)))))
    else:
        warp.meets[result.number] = warp.bits(source)[warp.active][0] >> np.arange(LANES) & 1 == 1


@meaning("EXIT")
def _exit(warp: Warp, it: Instruction) -> None:
    warp.alive = warp.alive & ~warp.active
    for number in warp.meets:
        _release(warp, number)


@meaning(
    "NOP", "YIELD", "WARPSYNC", "ENDCOLLECTIVE", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "DEPBAR", "LDGDEPBAR",
    "UCGABAR_ARV", "UCGABAR_WAIT", "ACQBULK", "PREEXIT", "FENCE", "LDTRAM", "NANOSLEEP", "CCTLL",
)  # fmt: skip
def _nothing(warp: Warp, it: Instruction) -> None:
    """One warp, alone and in order, has nobody to wait for."""
