"""A warp's registers and predicates, and the operands of its instructions."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.proof.sass.code import Operand
from tests.proof.sass.memory import LANES, Constants, Lanes

Register = tuple[str, int]


class Access(NamedTuple):
    """What the lanes that took part asked for."""

    space: str  # global, shared, constant
    is_load: bool
    width: int  # bytes a lane
    addresses: list[int]


@dataclass
class Step:
    """What one instruction read and wrote."""

    reads: list[Register] = field(default_factory=list)
    writes: list[Register] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)


class Registers:
    """Every number has a value for each lane, those of uniform registers too."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.registers = {kind: np.zeros((256, LANES), np.uint32) for kind in ("R", "UR")}
        self.predicates = {kind: np.zeros((8, LANES), bool) for kind in ("P", "UP")}
        for them in self.predicates.values():
            them[7] = True
        self.active = np.ones(LANES, bool)  # lanes of the instruction that is being done
        self.step = Step()

    def bits(self, it: Operand) -> Lanes:
        """32 bits of an integer operand."""
        value = self._raw(it)
        if it.inverted:
            return ~value
        return np.uint32(0) - value if it.negative and it.kind != "number" else value

    def wide(self, it: Operand) -> Lanes:
        """64 bits: a pair of registers, say."""
        if it.kind == "number":
            return np.full(LANES, it.value, np.uint64)
        low, high = (self._raw(it, part).astype(np.uint64) for part in (0, 1))
        value: Lanes = low | high << np.uint64(32)
        return ~value if it.inverted else np.uint64(0) - value if it.negative else value

    def single(self, it: Operand) -> Lanes:
        return self._signed(it, self._raw(it).view(np.float32))

    def double(self, it: Operand) -> Lanes:
        if it.kind == "number":
            is_bits = isinstance(it.value, int)
            bits = np.uint64(int(it.value) << 32 & (1 << 64) - 1) if is_bits else np.float64(it.value).view(np.uint64)
            return np.full(LANES, bits).view(np.float64)
        low, high = (self._raw(it, part).astype(np.uint64) for part in (0, 1))
        return self._signed(it, (low | high << np.uint64(32)).view(np.float64))

    @staticmethod
    def _signed(it: Operand, value: Lanes) -> Lanes:
        value = np.abs(value) if it.absolute else value
        return -value if it.negative and it.kind != "number" else value

    def _raw(self, it: Operand, part: int = 0) -> Lanes:
        if it.kind in ("R", "UR"):
            if it.number == 255:
                return np.zeros(LANES, np.uint32)
            self.step.reads.append((it.kind, it.number + part))
            return self.registers[it.kind][it.number + part]
        if it.kind == "constant":
            return self.constant(it, 4, part * 4).view(np.uint32)[:, 0]
        if it.kind == "number":
            value = np.float32(it.value).view(np.uint32) if isinstance(it.value, float) else it.value & 0xFFFFFFFF
            return np.full(LANES, value, np.uint32)
        raise NotImplementedError(f"an operand {it}")

    def predicate(self, it: Operand) -> Lanes:
        if it.number != 7:
            self.step.reads.append((it.kind, it.number))
        value = self.predicates[it.kind][it.number]
        return ~value if it.inverted else value

    def put(self, it: Operand, *words: Lanes) -> None:
        """Into a register, and those after it."""
        if it.number == 255:
            return
        for part, word in enumerate(words):
            self.step.writes.append((it.kind, it.number + part))
            if it.kind == "UR":
                word, lanes = word[self.active][0], np.s_[:]
            else:
                word, lanes = word[self.active], self.active
            self.registers[it.kind][it.number + part][lanes] = word

    def put_wide(self, it: Operand, value: Lanes) -> None:
        value = value.astype(np.uint64)
        self.put(it, (value & np.uint64(0xFFFFFFFF)).astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32))

    def put_single(self, it: Operand, value: Lanes) -> None:
        self.put(it, value.astype(np.float32).view(np.uint32))

    def put_double(self, it: Operand, value: Lanes) -> None:
        self.put_wide(it, value.astype(np.float64).view(np.uint64))

    def put_predicate(self, it: Operand, value: Lanes) -> None:
        if it.number == 7:
            return
        self.step.writes.append((it.kind, it.number))
        lanes = np.s_[:] if it.kind == "UP" else self.active
        self.predicates[it.kind][it.number][lanes] = value[self.active][0] if it.kind == "UP" else value[lanes]

    def addresses(self, it: Operand) -> Lanes:
        at = np.full(LANES, it.offset, np.int64)
        for kind, number, part in it.registers:
            register = Operand(kind, number)
            is_wide = part == "64" or (kind == "UR" and self._is_base_of_64_bits(it))
            value = self.wide(register) if is_wide else self.bits(register)
            at = at + value.astype(np.int64) * (int(part[1:]) if part[:1] == "X" else 1)
        return at

    @staticmethod
    def _is_base_of_64_bits(it: Operand) -> bool:
        """[R2.U32+UR4], [R2.64+UR4] of global memory, unlike [UR4+0x8] of shared."""
        return any(kind == "R" and part in ("64", "U32") for kind, _, part in it.registers)

    def constant(self, it: Operand, size: int, further: int = 0) -> Lanes:
        """A row of bytes a lane."""
        at = self.addresses(it) + further
        if it.registers:
            self.step.accesses.append(Access("constant", True, size, at[self.active].tolist()))
            at = at if len({*at.tolist()}) > 1 else at[:1]
        else:
            at = at[:1]
        found = [np.frombuffer(self.constants.read(it.number, int(one), size), np.uint8) for one in at]
        return np.ascontiguousarray(np.broadcast_to(np.stack(found), (LANES, size)))
