"""What instructions on floats do."""

from collections.abc import Callable

import numpy as np

from tests.proof.sass.bits import COMPARE, put_comparison
from tests.proof.sass.code import Instruction
from tests.proof.sass.memory import Lanes
from tests.proof.sass.warp import Warp, meaning

Exact = np.longdouble  # a product of fp32 fits, and a sum is rounded twice only where 64 bits end in a tie
SMALLEST = np.finfo(np.float32).tiny


def rounded(value: Lanes, instruction: Instruction) -> Lanes:
    """Round to fp32, in the direction that the instruction asks for."""
    near = value.astype(np.float32)
    if "RP" in instruction.modifiers:
        near = np.where(near < value, np.nextafter(near, np.float32(np.inf)), near)
    if "RM" in instruction.modifiers:
        near = np.where(near > value, np.nextafter(near, np.float32(-np.inf)), near)
    if "RZ" in instruction.modifiers:
        near = np.where(np.abs(near) > np.abs(value), np.nextafter(near, np.float32(0)), near)
    if "FTZ" in instruction.modifiers:
        near = np.where(np.abs(near) < SMALLEST, near * np.float32(0), near)
    if "SAT" in instruction.modifiers:
        near = np.clip(np.nan_to_num(near), np.float32(0), np.float32(1))
    return near


@meaning("FADD")
def _add(warp: Warp, instruction: Instruction) -> None:
    result, *sources = instruction.operands
    a, b = (warp.single(one).astype(np.float64) for one in sources)
    warp.put_single(result, rounded(a + b, instruction))


@meaning("FMUL")
def _multiply(warp: Warp, instruction: Instruction) -> None:
    result, a, b = instruction.operands
    warp.put_single(result, rounded(warp.single(a).astype(np.float64) * warp.single(b).astype(np.float64), instruction))


@meaning("FFMA")
def _fused(warp: Warp, instruction: Instruction) -> None:
    result, a, b, c = instruction.operands
    product = warp.single(a).astype(Exact) * warp.single(b).astype(Exact)
    warp.put_single(result, rounded(product + warp.single(c).astype(Exact), instruction))


@meaning("FADD2", "FMUL2", "FFMA2")
def _pairs(warp: Warp, instruction: Instruction) -> None:
    """Two neighbours at once, in either order. An operand of one number serves both."""
    result, *sources = instruction.operands
    halves = []
    for i in (0, 1):
        a, *others = (
            warp.single(one._replace(number=one.number + (i ^ ("LO_HI" in one.part))))
            if "F32x2" in one.part and one.number != 255
            else warp.single(one)
            for one in sources
        )
        value = a.astype(Exact)
        if instruction.name != "FADD2":
            value = value * others.pop(0).astype(Exact)
        if instruction.name != "FMUL2":
            value = value + others.pop(0).astype(Exact)
        halves.append(rounded(value, instruction).view(np.uint32))
    warp.put(result, *halves)


@meaning("DADD", "DMUL", "DFMA")
def _double(warp: Warp, instruction: Instruction) -> None:
    result, *sources = instruction.operands
    values = [warp.double(one) for one in sources if one.kind != "P"]
    if instruction.name == "DADD":
        value = values[0] + values[-1]
    elif instruction.name == "DMUL":
        value = values[0] * values[1]
    else:
        value = values[0].astype(Exact) * values[1].astype(Exact) + values[2].astype(Exact)
    warp.put_double(result, value)


def float_compare(how: str, a: Lanes, b: Lanes) -> Lanes:
    unordered = np.isnan(a) | np.isnan(b)
    if how in ("NAN", "NUM"):
        return unordered if how == "NAN" else ~unordered
    if how.endswith("U") and how[:-1] in COMPARE:
        return COMPARE[how[:-1]](a, b) | unordered
    value: Lanes = COMPARE[how](a, b)
    return value & ~unordered


@meaning("FSETP", "DSETP")
def _compare(warp: Warp, instruction: Instruction) -> None:
    a, b = (warp.single(one) if instruction.name == "FSETP" else warp.double(one) for one in instruction.operands[2:4])
    put_comparison(warp, instruction, float_compare(instruction.modifiers[0], a, b))


@meaning("FSET")
def _compare_into_register(warp: Warp, instruction: Instruction) -> None:
    how = next(one for one in instruction.modifiers if one != "BF")
    result, a, b = instruction.operands[:3]
    value = float_compare(how, warp.single(a), warp.single(b))
    one = np.float32(1).view(np.uint32) if "BF" in instruction.modifiers else np.uint32(0xFFFFFFFF)
    warp.put(result, np.where(value, one, np.uint32(0)))


@meaning("FSEL")
def _select(warp: Warp, instruction: Instruction) -> None:
    result, a, b, which = instruction.operands
    warp.put_single(result, np.where(warp.predicate(which), warp.single(a), warp.single(b)))


@meaning("FMNMX", "FMNMX3")
def _extreme(warp: Warp, instruction: Instruction) -> None:
    result, *sources, is_least = instruction.operands
    values = [warp.single(one) for one in sources]
    passes_nan = "NAN" in instruction.modifiers
    least, most = (np.minimum, np.maximum) if passes_nan else (np.fmin, np.fmax)
    is_min = warp.predicate(is_least)
    value = values[0]
    for other in values[1:]:
        value = np.where(is_min, least(value, other), most(value, other))
    warp.put_single(result, value)


FUNCTIONS: dict[str, Callable[[Lanes], Lanes]] = {
    "RCP": lambda x: 1 / x,
    "RSQ": lambda x: 1 / np.sqrt(x),
    "EX2": np.exp2,
}


@meaning("MUFU")
def _function(warp: Warp, instruction: Instruction) -> None:
    """Round to the nearest. The chip's own tables are nearly as exact; code that needs exact results corrects them."""
    result, source = instruction.operands
    name = instruction.modifiers[0]
    if name.endswith("64H"):  # the high word of an fp64
        value = (warp.bits(source).astype(np.uint64) << np.uint64(32)).view(np.float64)
        high = FUNCTIONS[name[:3]](value).view(np.uint64) >> np.uint64(32)
        warp.put(result, high.astype(np.uint32))
    else:
        warp.put_single(result, FUNCTIONS[name](warp.single(source).astype(np.float64)))


@meaning("FCHK")
def _division_is_risky(warp: Warp, instruction: Instruction) -> None:
    """Tell whether a quotient, or what it is computed from, may leave the normal numbers."""
    result, a, b = instruction.operands
    x, y = (np.frexp(np.abs(warp.single(one).astype(np.float64)))[1] for one in (a, b))
    nan = ~np.isfinite(warp.single(a)) | ~np.isfinite(warp.single(b)) | (warp.single(b) == 0)
    risky = nan | (np.abs(y) > 124) | (np.abs(x - y) > 124) | ((x < -100) & (warp.single(a) != 0))
    warp.put_predicate(result, risky)
