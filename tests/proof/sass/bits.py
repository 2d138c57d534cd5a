"""What instructions on bits and predicates do: logic, comparisons, shifts, moves."""

import numpy as np

from tests.proof.sass.code import Instruction
from tests.proof.sass.memory import LANES, Lanes
from tests.proof.sass.warp import Warp, meaning

U64 = np.uint64
LOW = U64(0xFFFFFFFF)


def _look_up(table: int, a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """The function of three bits whose values are the table's bits, for each bit of a, b, c."""
    result = a & ~a
    for i in range(8):
        if table >> i & 1:
            term = ~result | result
            for bit, source in zip((4, 2, 1), (a, b, c), strict=True):
                term = term & (source if i & bit else ~source)
            result = result | term
    return result


@meaning("LOP3", "ULOP3")
def _logic(warp: Warp, instruction: Instruction) -> None:
    *predicates, result = (
        [instruction.operands[0]] if instruction.operands[0].kind in ("R", "UR") else instruction.operands[:2]
    )
    a, b, c, table, further = instruction.operands[len(predicates) + 1 :]
    value = _look_up(int(table.value), warp.bits(a), warp.bits(b), warp.bits(c))
    warp.put(result, value)
    for predicate in predicates:
        warp.put_predicate(predicate, (value != 0) | warp.predicate(further))


@meaning("PLOP3", "UPLOP3")
def _logic_of_predicates(warp: Warp, instruction: Instruction) -> None:
    first, second, a, b, c, table, other = instruction.operands
    values = [warp.predicate(one) for one in (a, b, c)]
    for result, one in ((first, table), (second, other)):
        warp.put_predicate(result, _look_up(int(one.value), *values))


COMPARE = {"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal}
COMPARE["NE"] = np.not_equal
JOIN = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


def put_comparison(warp: Warp, instruction: Instruction, value: Lanes) -> None:
    """Put the comparison, joined with a predicate, and into the second result its opposite, joined likewise."""
    first, second, _, _, further = instruction.operands[:5]
    join = JOIN[next(one for one in instruction.modifiers if one in JOIN)]
    with_what = warp.predicate(further)
    warp.put_predicate(first, join(value, with_what))
    warp.put_predicate(second, join(~value, with_what))


@meaning("ISETP", "UISETP")
def _compare(warp: Warp, instruction: Instruction) -> None:
    how, modifiers = instruction.modifiers[0], instruction.modifiers
    if "64" in modifiers or "U64" in modifiers or "S64" in modifiers:
        a, b = (warp.wide(one).view(U64 if "U64" in modifiers else np.int64) for one in instruction.operands[2:4])
    else:
        a, b = (warp.bits(one).view(np.uint32 if "U32" in modifiers else np.int32) for one in instruction.operands[2:4])
    value = COMPARE[how](a, b)
    if "EX" in modifiers:  # of the high words; the low words' comparison decides where these are equal
        low = warp.predicate(instruction.operands[5])
        value = low | (a != b) if how == "NE" else (value & low if how == "EQ" else np.where(a == b, low, value))
    put_comparison(warp, instruction, value)


@meaning("SEL", "USEL")
def _select(warp: Warp, instruction: Instruction) -> None:
    result, a, b, which = instruction.operands
    if "64" in instruction.modifiers:
        warp.put_wide(result, np.where(warp.predicate(which), warp.wide(a), warp.wide(b)))
    else:
        warp.put(result, np.where(warp.predicate(which), warp.bits(a), warp.bits(b)))


@meaning("SHF", "USHF")
def _shift(warp: Warp, instruction: Instruction) -> None:
    result, low, by, high = instruction.operands
    joined = warp.bits(low).astype(U64) | warp.bits(high).astype(U64) << U64(32)
    limit = 63 if {"U64", "S64"} & {*instruction.modifiers} else 32
    shift = (
        warp.bits(by) & np.uint32(31) if "W" in instruction.modifiers else np.minimum(warp.bits(by), np.uint32(limit))
    )
    shift = shift.astype(U64)
    is_signed = {"S32", "S64"} & {*instruction.modifiers}
    if "L" in instruction.modifiers:
        moved = joined << shift
    else:
        moved = (joined.view(np.int64) >> shift.view(np.int64)).view(U64) if is_signed else joined >> shift
    warp.put(result, (moved >> U64(32) if "HI" in instruction.modifiers else moved & LOW).astype(np.uint32))


@meaning("PRMT", "UPRMT")
def _permute(warp: Warp, instruction: Instruction) -> None:
    result, a, selector, b = instruction.operands
    pool = warp.bits(a).astype(U64) | warp.bits(b).astype(U64) << U64(32)
    choice, value = warp.bits(selector), np.zeros(LANES, np.uint32)
    for i in range(4):
        nibble = choice >> np.uint32(4 * i) & np.uint32(15)
        byte = (pool >> (nibble & np.uint32(7)).astype(U64) * U64(8)).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        value = value | np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    warp.put(result, value)


@meaning("MOV", "UMOV", "R2UR", "CS2UR")
def _move(warp: Warp, instruction: Instruction) -> None:
    result, source = (
        instruction.operands[0],
        instruction.operands[-1] if instruction.operands[-1].kind != "P" else instruction.operands[-2],
    )
    if "64" in instruction.modifiers:
        warp.put_wide(result, warp.wide(source))
    else:
        warp.put(result, warp.bits(source))


SPECIAL = {
    "SR_TID.X": lambda warp: np.arange(LANES) + LANES * warp.number,
    "SR_LANEID": lambda warp: np.arange(LANES),
    **{f"SR_CTAID.{axis}": lambda warp, i=i: np.full(LANES, (*warp.block, 0, 0)[i]) for i, axis in enumerate("XYZ")},
}


@meaning("S2R", "S2UR", "CS2R")
def _special(warp: Warp, instruction: Instruction) -> None:
    value = SPECIAL.get(instruction.operands[1].part, lambda warp: np.zeros(LANES))(warp).astype(np.uint32)
    words = (
        [value] if instruction.name != "CS2R" or "32" in instruction.modifiers else [value, np.zeros(LANES, np.uint32)]
    )
    warp.put(instruction.operands[0], *words)


@meaning("SGXT", "USGXT")
def _extend(warp: Warp, instruction: Instruction) -> None:
    """The sign of a number of so many bits; of one without a sign zeros."""
    result, source, size = instruction.operands
    spare = (32 - int(size.value)) & 31
    value = warp.bits(source) << np.uint32(spare)
    kind = np.uint32 if "U32" in instruction.modifiers else np.int32
    warp.put(result, (value.view(kind) >> kind(spare)).view(np.uint32))


@meaning("POPC", "UPOPC")
def _count_bits(warp: Warp, instruction: Instruction) -> None:
    warp.put(instruction.operands[0], np.bitwise_count(warp.bits(instruction.operands[1])).astype(np.uint32))


@meaning("FLO", "UFLO")
def _leading_one(warp: Warp, instruction: Instruction) -> None:
    *_, source = instruction.operands
    value = warp.bits(source)
    if "U32" not in instruction.modifiers:
        value = np.where(value.view(np.int32) < 0, ~value, value)
    place = np.where(value, np.floor(np.log2(np.maximum(value, 1).astype(np.float64))), 0).astype(np.uint32)
    place = np.uint32(31) - place if "SH" in instruction.modifiers else place
    warp.put(instruction.operands[0], np.where(value, place, np.uint32(0xFFFFFFFF)))


@meaning("P2R", "UP2UR")
def _predicates_to_bits(warp: Warp, instruction: Instruction) -> None:
    result, _, source, mask = instruction.operands
    predicates = warp.predicates["UP" if instruction.name == "UP2UR" else "P"]
    value = np.zeros(LANES, np.uint32)
    for i in range(7):
        value = value | predicates[i].astype(np.uint32) << np.uint32(i)
    chosen = warp.bits(mask)
    warp.put(result, warp.bits(source) & ~chosen | value & chosen)
