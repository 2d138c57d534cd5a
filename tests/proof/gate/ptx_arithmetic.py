"""Integer arithmetic of PTX with numbers: what is known of the registers of one thread."""

import operator
import re
from collections.abc import Callable

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
COMPUTE: dict[str, Callable[..., int]] = {
    "mov": lambda a: a, "cvt": lambda a: a, "cvta": lambda a: a, "neg": operator.neg, "not": operator.invert,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mad": lambda a, b, c: a * b + c,
    "min": min, "max": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "shl": operator.lshift, "shr": operator.rshift, "selp": lambda a, b, c: a if c else b,
    "bfe": lambda a, first, count: a >> first & (1 << count) - 1,
    "div": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
}  # fmt: skip


class Registers:
    """Numbers by register; of what arguments or memory decide, None. Shared memory begins at 0."""

    def __init__(self) -> None:
        self._values: dict[str, int | None] = {"global_smem": 0}

    def value(self, operand: str) -> int | None:
        name, plus, offset = operand.strip().partition("+")
        if re.fullmatch(r"-?\d+", name):
            return int(name)
        value = self._values.get(name)
        return value if value is None or not plus else value + int(offset)

    def execute(self, statement: str) -> None:
        """Take note of what a statement writes. A predicated one may not have been executed."""
        found = re.fullmatch(r"(@\S+ )?(\w+)\.(\S+) (\{[^}]*\}|%[\w|%]+), (.+)", statement)
        if found:
            predicate, name, kinds, targets, operands = found.groups()
            values = [self.value(it) for it in operands.split(",")]
            known = [it for it in values if it is not None]
            written = re.findall(r"%\w+", targets)
            is_known = len(known) == len(values) and len(written) == 1 and not predicate
            result = _compute(name, kinds.split("."), known) if is_known else None
            self._values.update(dict.fromkeys(written, result))


def _compute(name: str, kinds: list[str], values: list[int]) -> int | None:
    kind, bits = kinds[0] if name == "cvt" else kinds[-1], re.sub(r"\D", "", kinds[-1])
    if name == "setp":
        return COMPARE[kinds[0]](*(_as(kinds[-1], it) for it in values)) if kinds[0] in COMPARE else None
    if name not in COMPUTE or (kind[0] not in "bus" and kind != "pred"):
        return None
    if "wide" in kinds:
        kind = f"{kind[0]}{2 * int(bits)}"
    result = COMPUTE[name](*(it if name == "selp" else _as(kinds[-1], it) for it in values))
    return _as(kind, result >> int(bits) if "hi" in kinds else result)


def _as(kind: str, value: int) -> int:
    """Return the number that the bits of a value are in a type such as u32; in bits alone, that is b32, unsigned."""
    if kind == "pred":
        return value & 1
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value
