"""What instructions do that turn numbers of one format into another, and those on pairs of 16-bit floats."""

import numpy as np

from tests.proof.sass.bits import COMPARE, JOIN
from tests.proof.sass.code import Instruction, Operand
from tests.proof.sass.floats import Exact, float_compare, rounded
from tests.proof.sass.memory import LANES, Lanes
from tests.proof.sass.warp import Warp, meaning


def _halves(operand: Operand, bits: Lanes) -> Lanes:
    return (bits >> np.uint32(16 if operand.part == "H1_H1" else 0) & np.uint32(0xFFFF)).astype(np.uint16)


def _widened(instruction: Instruction, half: Lanes) -> Lanes:
    if "BF16_V2" in instruction.modifiers:
        return (half.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return half.view(np.float16).astype(np.float32)


@meaning("HFMA2")
def _half_constants(warp: Warp, instruction: Instruction) -> None:
    """Put two halves, plus 0 times 0: compilers make a constant so, or a pair's magnitudes. No other use is known."""
    result, a, b, *halves = instruction.operands
    if (a.number, b.number) != (255, 255) or halves[0].negative:
        raise NotImplementedError(instruction.text)
    if len(halves) == 1:
        bits = warp.bits(halves[0])
        warp.put(result, bits & np.uint32(0x7FFF7FFF) if halves[0].absolute else bits)
    else:
        high, low = (np.float32(one.value).astype(np.float16).view(np.uint16).astype(np.uint32) for one in halves)
        warp.put(result, np.full(LANES, high << np.uint32(16) | low))


@meaning("HSETP2")
def _half_compare(warp: Warp, instruction: Instruction) -> None:
    """The low halves' result, and the high halves'. Two numbers are a high and a low one."""
    low, high, a, *others, further = instruction.operands
    how = next(one for one in instruction.modifiers if one in COMPARE or one.removesuffix("U") in COMPARE)
    join = JOIN[next(one for one in instruction.modifiers if one in JOIN)]
    for result, part, b in ((low, "H0_H0", others[-1]), (high, "H1_H1", others[0])):
        x, y = (_half(warp, instruction, one, part) for one in (a, b))
        warp.put_predicate(result, join(float_compare(how, x, y), warp.predicate(further)))


def _half(warp: Warp, instruction: Instruction, one: Operand, part: str) -> Lanes:
    if one.kind == "number":
        return np.full(LANES, one.value, np.float32)
    bare = one._replace(part=one.part or part, negative=False)
    return warp._signed(one, _widened(instruction, _halves(bare, warp.bits(bare))))


@meaning("HADD2")
def _half_add(warp: Warp, instruction: Instruction) -> None:
    """Put a half, plus -0, in fp32: compilers widen so. No other use is known."""
    result, zero, source = instruction.operands
    if instruction.modifiers not in (("F32",), ("BF16_V2", "F32")) or zero.number != 255:
        raise NotImplementedError(instruction.text)
    value = _widened(instruction, _halves(source, warp.bits(source._replace(negative=False))))
    warp.put_single(result, -value if source.negative else value)


def _narrow(value: Lanes, to_bf16: bool) -> Lanes:
    if not to_bf16:
        return value.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = value.view(np.uint32)
    near = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), near)


@meaning("F2FP")
def _pack(warp: Warp, instruction: Instruction) -> None:
    result, high, low = instruction.operands[:3]
    to_bf16 = "BF16" in instruction.modifiers
    upper, lower = (_narrow(warp.single(one), to_bf16) for one in (high, low))
    warp.put(result, upper << np.uint32(16) | lower)


@meaning("F2F", "FRND")
def _convert(warp: Warp, instruction: Instruction) -> None:
    result, source = instruction.operands
    to, *origin = (one for one in instruction.modifiers if one in ("F64", "F32", "F16", "BF16"))
    value = warp.double(source) if (origin or [to])[0] == "F64" else warp.single(source)
    if instruction.name == "FRND" or not origin:
        how = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}
        value = next((how[one] for one in instruction.modifiers if one in how), np.rint)(value)
    if to == "F64":
        warp.put_double(result, value.astype(np.float64))
    elif to in ("F16", "BF16"):
        warp.put(result, _narrow(value, to == "BF16"))
    else:
        warp.put_single(result, rounded(value, instruction))


@meaning("I2F", "I2FP")
def _from_integer(warp: Warp, instruction: Instruction) -> None:
    result, source = instruction.operands
    kind = next((one for one in instruction.modifiers if one[0] in "US" and one[1:].isdigit()), "S32")
    size = int(kind[1:])
    raw = warp.wide(source) if size == 64 else warp.bits(source).astype(np.uint64)
    byte = int(source.part[1]) * 8 if source.part[:1] == "B" else 16 if source.part == "H1" else 0
    value = (raw >> np.uint64(byte)) << np.uint64(64 - size)
    if kind[0] == "S":
        value = (value.view(np.int64) >> np.int64(64 - size)).astype(Exact)
    else:
        value = (value >> np.uint64(64 - size)).astype(Exact)
    if "F64" in instruction.modifiers:
        warp.put_double(result, value)
    else:
        warp.put_single(result, rounded(value, instruction))


@meaning("F2I")
def _to_integer(warp: Warp, instruction: Instruction) -> None:
    result, source = instruction.operands
    value = (warp.double(source) if "F64" in instruction.modifiers else warp.single(source)).astype(Exact)
    how = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}
    whole = np.nan_to_num(next((how[one] for one in instruction.modifiers if one in how), np.rint)(value))
    size = 64 if {"U64", "S64"} & {*instruction.modifiers} else 32
    is_unsigned = {"U64", "U32"} & {*instruction.modifiers}
    least, most = (0, 2**size - 1) if is_unsigned else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)
    numbers = np.array([min(max(int(one), least), most) & (1 << 64) - 1 for one in whole], np.uint64)
    if size == 64:
        warp.put_wide(result, numbers)
    else:
        warp.put(result, (numbers & np.uint64(0xFFFFFFFF)).astype(np.uint32))
