"""What instructions do that move data, lanes, and the warp's place in the code."""

import numpy as np

from tests.proof.sass.code import Instruction, Operand
from tests.proof.sass.memory import LANES, Lanes
from tests.proof.sass.warp import Warp, meaning

SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def size_of(instruction: Instruction) -> int:
    return next((SIZES[one] for one in instruction.modifiers if one in SIZES), 4)


def _put_rows(warp: Warp, instruction: Instruction, result: Operand, rows: Lanes) -> None:
    """Put each lane's bytes into registers, a small number with its sign where it has one."""
    size = rows.shape[1]
    if size < 4:
        kind = ("i" if {"S8", "S16"} & {*instruction.modifiers} else "u") + str(size)
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
def _load(warp: Warp, instruction: Instruction) -> None:
    result, source = [one for one in instruction.operands if one.kind != "P"][:2]
    _put_rows(warp, instruction, result, warp.load("global", source, size_of(instruction)))


@meaning("LDS")
def _load_shared(warp: Warp, instruction: Instruction) -> None:
    _put_rows(
        warp, instruction, instruction.operands[0], warp.load("shared", instruction.operands[1], size_of(instruction))
    )


@meaning("LDSM")
def _load_matrices(warp: Warp, instruction: Instruction) -> None:
    """8 x 8 halves, or several: eight lanes each say where a row is, and each lane gets two neighbours; of a transposed
    matrix, two below each other."""
    count, rows = next((int(one) for one in instruction.modifiers if one in "24"), 1), np.arange(8)
    asking = warp.active & (np.arange(LANES) < 8 * count)
    everyone, warp.active = warp.active, asking
    bytes_of_rows = warp.load("shared", instruction.operands[1], 16)
    warp.active = everyone
    words = []
    for matrix in range(count):
        halves = np.ascontiguousarray(bytes_of_rows[8 * matrix + rows]).view(np.uint16)
        halves = halves.T if "MT88" in instruction.modifiers else halves
        words.append(np.ascontiguousarray(halves).view(np.uint32).reshape(-1))
    warp.put(instruction.operands[0], *words)


@meaning("LDC", "ULDC", "LDCU")
def _load_constant(warp: Warp, instruction: Instruction) -> None:
    _put_rows(warp, instruction, instruction.operands[0], warp.constant(instruction.operands[1], size_of(instruction)))


@meaning("STG", "ST")
def _store(warp: Warp, instruction: Instruction) -> None:
    warp.store("global", instruction.operands[0], _rows(warp, instruction.operands[1], size_of(instruction)))


@meaning("STS")
def _store_shared(warp: Warp, instruction: Instruction) -> None:
    warp.store("shared", instruction.operands[0], _rows(warp, instruction.operands[1], size_of(instruction)))


@meaning("ATOMG", "ATOM", "RED", "REDG")
def _atomic(warp: Warp, instruction: Instruction) -> None:
    """Give each lane what was there before. Nothing is added, as if this block came first."""
    memory = next(one for one in instruction.operands if one.kind == "memory")
    rows = warp.load("global", memory, size_of(instruction))
    results = [one for one in instruction.operands[: instruction.operands.index(memory)] if one.kind == "R"]
    for result in results:
        _put_rows(warp, instruction, result, rows)


@meaning("SHFL")
def _shuffle(warp: Warp, instruction: Instruction) -> None:
    predicate, result, source, by, _ = instruction.operands
    lane, step = np.arange(LANES), warp.bits(by).astype(np.int64)
    target = {"BFLY": lane ^ step, "IDX": step & 31, "UP": lane - step, "DOWN": lane + step}[instruction.modifiers[0]]
    inside = (target >= 0) & (target < LANES)
    warp.put(result, warp.bits(source)[np.where(inside, target, lane)])
    warp.put_predicate(predicate, inside)


@meaning("REDUX", "CREDUX")
def _reduce(warp: Warp, instruction: Instruction) -> None:
    kind = np.int32 if "S32" in instruction.modifiers else np.uint32
    values = warp.bits(instruction.operands[1]).view(kind)[warp.active]
    join = {"MAX": np.max, "MIN": np.min, "SUM": np.sum, "OR": np.bitwise_or.reduce, "AND": np.bitwise_and.reduce}
    joined = join[next((one for one in instruction.modifiers if one in join), "AND")](values)
    warp.put(instruction.operands[0], np.full(LANES, joined, kind).view(np.uint32))


@meaning("VOTE", "VOTEU")
def _vote(warp: Warp, instruction: Instruction) -> None:
    registers = [one for one in instruction.operands if one.kind in ("R", "UR")]
    *results, source = [one for one in instruction.operands if one.kind in ("P", "UP")]
    value = warp.predicate(source) & warp.active
    ballot = np.uint32(sum(1 << int(lane) for lane in np.flatnonzero(value)))
    answer = {"ANY": value.any(), "ALL": value[warp.active].all(), "EQ": len({*value[warp.active]}) == 1}
    for result in registers:
        warp.put(result, np.full(LANES, ballot))
    for result in results:
        warp.put_predicate(result, np.full(LANES, answer[instruction.modifiers[0]]))


@meaning("BAR")
def _meet_block(warp: Warp, instruction: Instruction) -> None:
    """The block's warps may vote there. One that is not run is taken to vote as the others do."""
    warp.meetings += 1
    if "RED" in instruction.modifiers:
        if "OR" not in instruction.modifiers:
            raise NotImplementedError(f"no meaning for {instruction.text}")
        vote = bool((warp.predicate(instruction.operands[-1]) & warp.active).any())
        warp.shared.votes[warp.meetings] = warp.shared.votes.get(warp.meetings, False) | vote


@meaning("B2R")
def _result_of_vote(warp: Warp, instruction: Instruction) -> None:
    warp.put_predicate(instruction.operands[-1], np.full(LANES, warp.shared.votes[warp.meetings]))


@meaning("BRA", "CALL")
def _branch(warp: Warp, instruction: Instruction) -> None:
    lanes = warp.active
    conditions = [one for one in instruction.operands if one.kind in ("P", "UP")]
    for condition in conditions:
        lanes = lanes & warp.predicate(condition)
    if "DIV" in instruction.modifiers and np.array_equal(warp.active, warp.alive):
        return
    warp.at[lanes] = int(instruction.operands[-1].value)


@meaning("RET")
def _return(warp: Warp, instruction: Instruction) -> None:
    warp.at[warp.active] = warp.bits(instruction.operands[0])[warp.active]


@meaning("BRX", "BRXU")
def _jump(warp: Warp, instruction: Instruction) -> None:
    """Jump to a place relative to the next instruction."""
    base, offset = instruction.operands[0], instruction.operands[-1].value
    offset = int(offset) - (1 << 64) if int(offset) >> 63 else int(offset)
    target = warp.at + warp.bits(base).view(np.int32) + offset
    warp.at[warp.active] = target[warp.active]


@meaning("BSSY")
def _will_meet(warp: Warp, instruction: Instruction) -> None:
    warp.meets[instruction.operands[0].number] = warp.active.copy()


@meaning("BREAK")
def _will_not_meet(warp: Warp, instruction: Instruction) -> None:
    number = instruction.operands[-1].number
    warp.meets[number] = warp.meets[number] & ~warp.active
    _release(warp, number)


@meaning("BSYNC")
def _meet(warp: Warp, instruction: Instruction) -> None:
    number = instruction.operands[0].number
    warp.waits_at[warp.active] = number
    _release(warp, number)


def _release(warp: Warp, number: int) -> None:
    waits = warp.waits_at == number
    if not (warp.meets[number] & warp.alive & ~waits).any():
        warp.waits_at[waits] = -1


@meaning("BMOV")
def _keep_meeting(warp: Warp, instruction: Instruction) -> None:
    """Move a barrier's lanes into a register, a bit each, or back: a function may need the barrier."""
    result, source = instruction.operands
    if result.kind == "R":
        lanes = warp.meets.get(source.number, np.zeros(LANES, bool))
        warp.put(result, np.full(LANES, np.uint32(sum(1 << int(lane) for lane in np.flatnonzero(lanes)))))
    else:
        warp.meets[result.number] = warp.bits(source)[warp.active][0] >> np.arange(LANES) & 1 == 1


@meaning("EXIT")
def _exit(warp: Warp, instruction: Instruction) -> None:
    warp.alive = warp.alive & ~warp.active
    for number in warp.meets:
        _release(warp, number)


@meaning(
    "NOP", "YIELD", "WARPSYNC", "ENDCOLLECTIVE", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "DEPBAR", "LDGDEPBAR",
    "UCGABAR_ARV", "UCGABAR_WAIT", "ACQBULK", "PREEXIT", "FENCE", "LDTRAM", "NANOSLEEP", "CCTLL",
)  # fmt: skip
def _nothing(warp: Warp, instruction: Instruction) -> None:
    """Do nothing: one warp, alone and in order, has nobody to wait for."""
