"""What instructions on floats do."""

from collections.abc import Callable

import numpy as np

from tests.proof.sass.bits import COMPARE, put_comparison
from tests.proof.sass.code import Instruction
from tests.proof.sass.memory import Lanes
from tests.proof.sass.warp import Warp, meaning

Exact = np.longdouble  # a product of fp32 fits, and a sum is rounded twice only where 64 bits end in a tie
SMALLEST = np.finfo(np.float32).tiny


def rounded(value: Lanes, it: Instruction) -> Lanes:
    """To fp32, in the direction that the instruction asks for."""
    near = value.astype(np.float32)
    if "RP" in it.modifiers:
        near = np.where(near < value, np.nextafter(near, np.float32(np.inf)), near)
    if "RM" in it.modifiers:
        near = np.where(near > value, np.nextafter(near, np.float32(-np.inf)), near)
    if "RZ" in it.modifiers:
        near = np.where(np.abs(near) > np.abs(value), np.nextafter(near, np.float32(0)), near)
    if "FTZ" in it.modifiers:
        near = np.where(np.abs(near) < SMALLEST, near * np.float32(0), near)
    if "SAT" in it.modifiers:
        near = np.clip(np.nan_to_num(near), np.float32(0), np.float32(1))
    return near


@meaning("FADD")
def _add(warp: Warp, it: Instruction) -> None:
    result, *sources = it.operands
    a, b = (warp.single(one).astype(np.float64) for one in sources)
    warp.put_single(result, rounded(a + b, it))


@meaning("FMUL")
def _multiply(warp: Warp, it: Instruction) -> None:
    result, a, b = it.operands
    warp.put_single(result, rounded(warp.single(a).astype(np.float64) * warp.single(b).astype(np.float64), it))


@meaning("FFMA")
def _fused(warp: Warp, it: Instruction) -> None:
    result, a, b, c = it.operands
    product = warp.single(a).astype(Exact) * warp.single(b).astype(Exact)
    warp.put_single(result, rounded(product + warp.single(c).astype(Exact), it))


@meaning("FADD2", "FMUL2", "FFMA2")
def _pairs(warp: Warp, it: Instruction) -> None:
    """Two neighbours at once, in either order. An operand of one number serves both."""
    result, *sources = it.operands
    halves = []
    for i in (0, 1):
        a, *others = (
            warp.single(one._replace(number=one.number + (i ^ ("LO_HI" in one.part))))
            if "F32x2" in one.part and one.number != 255
            else warp.single(one)
            for one in sources
        )
        value = a.astype(Exact)
        if it.name != "FADD2":
            value = value * others.pop(0).astype(Exact)
        if it.name != "FMUL2":
            value = value + others.pop(0).astype(Exact)
        halves.append(rounded(value, it).view(np.uint32))
    warp.put(result, *halves)


@meaning("DADD", "DMUL", "DFMA")
def _double(warp: Warp, it: Instruction) -> None:
    result, *sources = it.operands
    values = [warp.double(one) for one in sources if one.kind != "P"]
    if it.name == "DADD":
        value = values[0] + values[-1]
    elif it.name == "DMUL":
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
def _compare(warp: Warp, it: Instruction) -> None:
    a, b = (warp.single(one) if it.name == "FSETP" else warp.double(one) for one in it.operands[2:4])
    put_comparison(warp, it, float_compare(it.modifiers[0], a, b))


@meaning("FSET")
def _compare_into_register(warp: Warp, it: Instruction) -> None:
    how = next(one for one in it.modifiers if one != "BF")
    result, a, b = it.operands[:3]
    value = float_compare(how, warp.single(a), warp.single(b))
    one = np.float32(1).view(np.uint32) if "BF" in it.modifiers else np.uint32(0xFFFFFFFF)
    warp.put(result, np.where(value, one, np.uint32(0)))


@meaning("FSEL")
def _select(warp: Warp, it: Instruction) -> None:
    result, a, b, which = it.operands
    warp.put_single(result, np.where(warp.predicate(which), warp.single(a), warp.single(b)))


@meaning("FMNMX", "FMNMX3")
def _extreme(warp: Warp, it: Instruction) -> None:
    result, *sources, is_least = it.operands
    values = [warp.single(one) for one in sources]
    passes_nan = "NAN" in it.modifiers
    least, most = (np.minimum, np.maximum) if passes_nan else (np.fmin, np.fmax)
    is_min = warp.predicate(is_least)
    value = values[0]
    for other in values[1:]:
        value = np.where(is_min, least(value, other), most(value, other))
    warp.put_single(result, value)


FUNCTIONS: dict[str, Callable[[Lanes], Lanes]] = {
    "RCP": lambda x: 1 / x,
    "RSQ": lambda x: 1 / np.sqrt(x),
    "SQRT": np.sqrt,
    "EX2": np.exp2,
    "LG2": np.log2,
    "TANH": np.tanh,
    "SIN": np.sin,
    "COS": np.cos,
}


@meaning("MUFU")
def _function(warp: Warp, it: Instruction) -> None:
    """To the nearest, which the chip's own tables nearly are; code that needs exact results corrects them."""
    result, source = it.operands
    name = it.modifiers[0]
    if name.endswith("64H"):  # the high word of an fp64
        value = (warp.bits(source).astype(np.uint64) << np.uint64(32)).view(np.float64)
        high = FUNCTIONS[name[:3]](value).view(np.uint64) >> np.uint64(32)
        warp.put(result, high.astype(np.uint32))
    else:
        warp.put_single(result, FUNCTIONS[name](warp.single(source).astype(np.float64)))


@meaning("FCHK")
def _division_is_risky(warp: Warp, it: Instruction) -> None:
    """Whether a quotient, or what it is computed from, may leave the normal numbers."""
    result, a, b = it.operands
    x, y = (np.frexp(np.abs(warp.single(one).astype(np.float64)))[1] for one in (a, b))
    nan = ~np.isfinite(warp.single(a)) | ~np.isfinite(warp.single(b)) | (warp.single(b) == 0)
    risky = nan | (np.abs(y) > 124) | (np.abs(x - y) > 124) | ((x < -100) & (warp.single(a) != 0))
    warp.put_predicate(result, risky)
