"""A kernel's machine code, from cuobjdump's listing and from the cubin."""

import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple


class Operand(NamedTuple):
    kind: str  # R, UR, P, UP: a register; number; constant; memory; special; barrier
    number: int = 0  # of the register, or of a constant's bank
    value: int | float = 0  # whole if the listing has hexadecimal digits, which are bits
    part: str = ""  # H1_H1, B2, 64
    negative: bool = False
    absolute: bool = False
    inverted: bool = False
    offset: int = 0
    registers: tuple[tuple[str, int, str], ...] = ()  # of an address: kind, number, part


class Instruction(NamedTuple):
    address: int
    guard: Operand
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str


@dataclass
class Code:
    """The parts of a kernel that are needed to run it."""

    chip: str
    registers: int
    shared: int
    parameters_at: int  # where in constant bank 0 the launch's parameters begin
    listing: str
    constants: dict[int, bytes]
    _lines: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _instructions: dict[int, Instruction] = field(default_factory=dict)

    def at(self, address: int) -> Instruction:
        """Return an instruction. It is parsed only now: a listing has megabytes, of which a launch needs little."""
        if address not in self._instructions:
            if not self._lines:
                self._lines = {int(line[0], 16): line[1:] for line in LINE.findall(self.listing)}
            self._instructions[address] = _parse(address, *self._lines[address])
        return self._instructions[address]


ALWAYS = Operand("P", 7)
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(\S+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
REGISTER = re.compile(r"(UR|R|UP|P)(\d+|Z|T)((?:\.\w+)*)")
ADDRESS = re.compile(r"[+-]*0x[0-9a-f]+|[+-]?U?R(?:\d+|Z)(?:\.\w+)*")
LAST = {"RZ": 255, "URZ": 255, "PT": 7, "UPT": 7}


def _parse(address: int, guard: str, opcode: str, words: str) -> Instruction:
    name, *modifiers = opcode.split(".")
    operands = tuple(_operand(word) for word in _split(words))
    text = f"{opcode} {words}"
    return Instruction(address, _operand(guard) if guard else ALWAYS, name, tuple(modifiers), operands, text)


def _split(words: str) -> list[str]:
    found = re.split(r"\s*,\s*(?![^\[]*\])", words) if words else []
    *others, last = found or [""]
    return [it for it in (*others, *last.split(" ")) if it]  # RET.REL.NODEC R4 0x0


def _operand(word: str) -> Operand:
    word = word.replace(".reuse", "")
    if "[" in word:
        return _in_memory(word)
    negative, inverted = word.startswith("-"), word[0] in "!~"
    bare = word.lstrip("-!~")
    absolute = bare.startswith("|")
    bare = bare.replace("|", "")
    if match := REGISTER.fullmatch(bare):
        kind, number, part = match.groups()
        return Operand(kind, _number(kind, number), 0, part[1:], negative, absolute, inverted)
    if bare.startswith("0x"):
        value = int(bare, 16)
        return Operand("number", 0, (~value if inverted else -value if negative else value) & (1 << 64) - 1)
    if bare.startswith("SR"):
        return Operand("special", part=bare)
    if re.fullmatch(r"B\d+", bare):
        return Operand("barrier", int(bare[1:]))
    try:
        return Operand("number", 0, float(word.replace("QNAN", "nan").replace("SNAN", "nan")))
    except ValueError:
        return Operand("special", part=bare)


def _number(kind: str, digits: str) -> int:
    return LAST[kind + digits] if digits in "ZT" else int(digits)


def _in_memory(word: str) -> Operand:
    negative, absolute, inverted = word.startswith("-"), "|" in word, word.startswith("~")
    *before, inside = re.findall(r"\[([^\]]*)\]", word)
    registers, offset = [], 0
    for term in ADDRESS.findall(inside):
        if "0x" in term:
            offset += int(term.replace("+", ""), 16)
        else:
            kind, digits, part = REGISTER.fullmatch(term.lstrip("+-")).groups()  # type: ignore[union-attr]
            registers.append((kind, _number(kind, digits), part[1:]))
    is_constant = word.lstrip("-|~").startswith("c[")
    bank = int(before[0], 16) if is_constant and before else 0
    part = word.rpartition("]")[2].lstrip("|.")
    kind = "constant" if is_constant else "memory"
    return Operand(kind, bank, 0, part, negative, absolute, inverted, offset, tuple(registers))


def sections(cubin: bytes) -> dict[str, bytes]:
    """Return an ELF file's sections by their names."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    found = [struct.unpack_from("<IIQQQQIIQQ", cubin, headers + 64 * i) for i in range(count)]
    start = found[names][4]

    def name(at: int) -> str:
        return cubin[start + at : cubin.index(b"\0", start + at)].decode()

    nobits = 8
    return {name(it[0]): b"" if it[1] == nobits else cubin[it[4] : it[4] + it[5]] for it in found}


def read(cubin: bytes, kernel: str, chip: str, registers: int, shared: int, listing: str) -> Code:
    parts = sections(cubin)
    constants = {}
    for bank in range(1, 8):
        of_kernel, of_all = parts.get(f".nv.constant{bank}.{kernel}"), parts.get(f".nv.constant{bank}")
        if of_kernel or of_all:
            constants[bank] = of_kernel or of_all or b""
    return Code(chip, registers, shared, _parameters_at(parts[f".nv.info.{kernel}"]), listing, constants)


def _parameters_at(info: bytes) -> int:
    """From EIATTR_PARAM_CBANK: the symbol, then where the parameters begin, then their size."""
    at, with_size, param_cbank = 0, 4, 0x0A
    while at < len(info):
        layout, attribute, size = struct.unpack_from("<BBH", info, at)
        if (layout, attribute) == (with_size, param_cbank):
            return int(struct.unpack_from("<IHH", info, at + 4)[1])
        at += 4 + (size if layout == with_size else 0)
    raise ValueError("the cubin does not say where its parameters are")
