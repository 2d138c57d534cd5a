"""What instructions on integers and predicates do. Names are those of cuobjdump's listing; no manual says much more of
them than the name, so a test compares what whole kernels compute with the ops' references."""

import numpy as np

from tests.proof.sass.code import Instruction, Operand
from tests.proof.sass.memory import LANES, Lanes
from tests.proof.sass.warp import Warp, meaning

U64 = np.uint64
LOW = U64(0xFFFFFFFF)


def _parts(instruction: Instruction) -> tuple[list[Operand], list[Operand], list[Operand]]:
    """Return the result and the carries out of it, the sources, and the carries in."""
    operands = list(instruction.operands)
    begin = 1
    while operands[begin].kind in ("P", "UP"):
        begin += 1
    end = len(operands)
    while operands[end - 1].kind in ("P", "UP"):
        end -= 1
    return operands[:begin], operands[begin:end], operands[end:]


def _exact(warp: Warp, operand: Operand) -> Lanes:
    """Return 64 bits, and 2^32 for -0: a difference's carry says that it is not below 0."""
    if operand.negative and operand.kind != "number":
        return U64(1 << 32) - warp.bits(operand._replace(negative=False)).astype(U64)
    return warp.bits(operand).astype(U64)


def _carry_in(warp: Warp, instruction: Instruction, carries: list[Operand]) -> Lanes:
    total = np.zeros(LANES, U64)
    if "X" in instruction.modifiers:
        for carry in carries:
            total = total + warp.predicate(carry).astype(U64)
    return total


def _put_sum(warp: Warp, results: list[Operand], total: Lanes) -> None:
    warp.put(results[0], (total & LOW).astype(np.uint32))
    carry = total >> U64(32)
    for i, result in enumerate(results[1:], 1):
        warp.put_predicate(result, carry >= U64(i))


@meaning("IADD3", "UIADD3", "VIADD", "IADD", "UIADD")
def _add(warp: Warp, instruction: Instruction) -> None:
    results, sources, carries = _parts(instruction)
    total = _carry_in(warp, instruction, carries)
    if "64" in instruction.modifiers:
        warp.put_wide(results[0], sum((warp.wide(source) for source in sources), total))
    else:
        _put_sum(warp, results, sum((_exact(warp, source) for source in sources), total))


@meaning("IMAD", "UIMAD")
def _multiply_add(warp: Warp, instruction: Instruction) -> None:
    results, (a, b, c), carries = _parts(instruction)
    is_signed = "U32" not in instruction.modifiers
    if not {"WIDE", "HI"} & {*instruction.modifiers}:
        product = warp.bits(a).astype(U64) * warp.bits(b).astype(U64) & LOW
        _put_sum(warp, results, product + _exact(warp, c) + _carry_in(warp, instruction, carries))
        return
    factors = [warp.bits(one).view(np.int32).astype(np.int64) if is_signed else warp.bits(one) for one in (a, b)]
    x, y = (factor.astype(np.int64).view(U64) for factor in factors)
    product = x * y
    total = product + warp.wide(c) + _carry_in(warp, instruction, carries)
    if "HI" in instruction.modifiers:
        warp.put(results[0], (total >> U64(32)).astype(np.uint32))
    else:
        warp.put_wide(results[0], total)
    for result in results[1:]:
        warp.put_predicate(result, total < product)


@meaning("LEA", "ULEA")
def _shift_add(warp: Warp, instruction: Instruction) -> None:
    results, sources, carries = _parts(instruction)
    a, b, shift = sources[0], sources[1], int(sources[-1].value)
    value = warp.bits(a).astype(U64)
    if "SX32" in instruction.modifiers:
        value = warp.bits(a).view(np.int32).astype(np.int64).view(U64)
    elif "HI" in instruction.modifiers:
        value = value | warp.bits(sources[2]).astype(U64) << U64(32)
    value = value << U64(shift)
    part = (value >> U64(32) if "HI" in instruction.modifiers else value) & LOW
    if a.negative:
        part = U64(1 << 32) - part
    _put_sum(warp, results, part + _exact(warp, b) + _carry_in(warp, instruction, carries))


@meaning("IMNMX", "VIMNMX", "UIMNMX", "UVIMNMX")
def _extreme(warp: Warp, instruction: Instruction) -> None:
    results, (a, b), (is_least,) = _parts(instruction)
    kind = np.uint32 if "U32" in instruction.modifiers else np.int32
    x, y = warp.bits(a).view(kind), warp.bits(b).view(kind)
    warp.put(results[0], np.where(warp.predicate(is_least), np.minimum(x, y), np.maximum(x, y)).view(np.uint32))


@meaning("VIMNMX3")
def _extreme_of_three(warp: Warp, instruction: Instruction) -> None:
    results, sources, (is_least,) = _parts(instruction)
    kind = np.uint32 if "U32" in instruction.modifiers else np.int32
    values = np.stack([warp.bits(one).view(kind) for one in sources])
    warp.put(results[0], np.where(warp.predicate(is_least), values.min(0), values.max(0)).view(np.uint32))


@meaning("IABS")
def _absolute(warp: Warp, instruction: Instruction) -> None:
    warp.put(instruction.operands[0], np.abs(warp.bits(instruction.operands[1]).view(np.int32)).view(np.uint32))


@meaning("VIADDMNMX")
def _extreme_of_sum(warp: Warp, instruction: Instruction) -> None:
    results, (a, b, c), (is_least,) = _parts(instruction)
    kind = np.uint32 if "U32" in instruction.modifiers else np.int32
    x, y = (warp.bits(a) + warp.bits(b)).view(kind), warp.bits(c).view(kind)
    warp.put(results[0], np.where(warp.predicate(is_least), np.minimum(x, y), np.maximum(x, y)).view(np.uint32))
