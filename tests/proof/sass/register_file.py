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

    def bits(self, operand: Operand) -> Lanes:
        """32 bits of an integer operand."""
        value = self._raw(operand)
        if operand.inverted:
            return ~value
        return np.uint32(0) - value if operand.negative and operand.kind != "number" else value

    def wide(self, operand: Operand) -> Lanes:
        """64 bits: a pair of registers, say."""
        if operand.kind == "number":
            return np.full(LANES, operand.value, np.uint64)
        low, high = (self._raw(operand, part).astype(np.uint64) for part in (0, 1))
        value: Lanes = low | high << np.uint64(32)
        return ~value if operand.inverted else np.uint64(0) - value if operand.negative else value

    def single(self, operand: Operand) -> Lanes:
        return self._signed(operand, self._raw(operand).view(np.float32))

    def double(self, operand: Operand) -> Lanes:
        if operand.kind == "number":
            is_bits = isinstance(operand.value, int)
            bits = (
                np.uint64(int(operand.value) << 32 & (1 << 64) - 1)
                if is_bits
                else np.float64(operand.value).view(np.uint64)
            )
            return np.full(LANES, bits).view(np.float64)
        low, high = (self._raw(operand, part).astype(np.uint64) for part in (0, 1))
        return self._signed(operand, (low | high << np.uint64(32)).view(np.float64))

    @staticmethod
    def _signed(operand: Operand, value: Lanes) -> Lanes:
        value = np.abs(value) if operand.absolute else value
        return -value if operand.negative and operand.kind != "number" else value

    def _raw(self, operand: Operand, part: int = 0) -> Lanes:
        if operand.kind in ("R", "UR"):
            if operand.number == 255:
                return np.zeros(LANES, np.uint32)
            self.step.reads.append((operand.kind, operand.number + part))
            return self.registers[operand.kind][operand.number + part]
        if operand.kind == "constant":
            return self.constant(operand, 4, part * 4).view(np.uint32)[:, 0]
        if operand.kind == "number":
            value = (
                np.float32(operand.value).view(np.uint32)
                if isinstance(operand.value, float)
                else operand.value & 0xFFFFFFFF
            )
            return np.full(LANES, value, np.uint32)
        raise NotImplementedError(f"an operand {operand}")

    def predicate(self, operand: Operand) -> Lanes:
        if operand.number != 7:
            self.step.reads.append((operand.kind, operand.number))
        value = self.predicates[operand.kind][operand.number]
        return ~value if operand.inverted else value

    def put(self, operand: Operand, *words: Lanes) -> None:
        """Write words into a register and those after it."""
        if operand.number == 255:
            return
        for part, word in enumerate(words):
            self.step.writes.append((operand.kind, operand.number + part))
            if operand.kind == "UR":
                word, lanes = word[self.active][0], np.s_[:]
            else:
                word, lanes = word[self.active], self.active
            self.registers[operand.kind][operand.number + part][lanes] = word

    def put_wide(self, operand: Operand, value: Lanes) -> None:
        value = value.astype(np.uint64)
        self.put(operand, (value & np.uint64(0xFFFFFFFF)).astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32))

    def put_single(self, operand: Operand, value: Lanes) -> None:
        self.put(operand, value.astype(np.float32).view(np.uint32))

    def put_double(self, operand: Operand, value: Lanes) -> None:
        self.put_wide(operand, value.astype(np.float64).view(np.uint64))

    def put_predicate(self, operand: Operand, value: Lanes) -> None:
        if operand.number == 7:
            return
        self.step.writes.append((operand.kind, operand.number))
        lanes = np.s_[:] if operand.kind == "UP" else self.active
        self.predicates[operand.kind][operand.number][lanes] = (
            value[self.active][0] if operand.kind == "UP" else value[lanes]
        )

    def addresses(self, operand: Operand) -> Lanes:
        at = np.full(LANES, operand.offset, np.int64)
        for kind, number, part in operand.registers:
            register = Operand(kind, number)
            is_wide = part == "64" or (kind == "UR" and self._is_base_of_64_bits(operand))
            value = self.wide(register) if is_wide else self.bits(register)
            at = at + value.astype(np.int64) * (int(part[1:]) if part[:1] == "X" else 1)
        return at

    @staticmethod
    def _is_base_of_64_bits(operand: Operand) -> bool:
        """[R2.U32+UR4], [R2.64+UR4] of global memory, unlike [UR4+0x8] of shared."""
        return any(kind == "R" and part in ("64", "U32") for kind, _, part in operand.registers)

    def constant(self, operand: Operand, size: int, further: int = 0) -> Lanes:
        """Read a row of bytes for each lane."""
        at = self.addresses(operand) + further
        if operand.registers:
            self.step.accesses.append(Access("constant", True, size, at[self.active].tolist()))
            at = at if len({*at.tolist()}) > 1 else at[:1]
        else:
            at = at[:1]
        found = [np.frombuffer(self.constants.read(operand.number, int(one), size), np.uint8) for one in at]
        return np.ascontiguousarray(np.broadcast_to(np.stack(found), (LANES, size)))
