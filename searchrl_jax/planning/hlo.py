"""The text of a compiled program (optimised HLO, of one device), as instructions."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}

_HEADER = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")


@dataclass(frozen=True)
class Shape:
    """One array. `is_in_hbm` is false for what the compiler has put into a chip's own memories."""

    dtype: str
    dims: tuple[int, ...]
    is_in_hbm: bool

    @property
    def bytes(self) -> float:
        """Without the padding of tiles."""
        return math.prod(self.dims) * BYTES.get(self.dtype, 0)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. A tuple has several `shapes`."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute (calls, body, condition) names."""
        found = re.search(rf"\b{attribute}=%?([^\s,)]+)", self.attributes)
        return found and found.group(1)

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from; empty where the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions, in the order in which they run."""

    name: str
    instructions: Sequence[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {each.name: each for each in self.instructions}

    @cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """The instructions that read each one."""
        found: dict[str, list[Instruction]] = {each.name: [] for each in self.instructions}
        for each in self.instructions:
            for name in dict.fromkeys(each.operands):
                if name in found:
                    found[name].append(each)
        return found


@dataclass(frozen=True)
class Program:
    """All computations by name, and the name of the one that runs."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """The program in `text`.

    Raises:
        ValueError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    current: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = []
            computations[header.group(1)] = Computation(header.group(1), current)
            if line.startswith("ENTRY"):
                entry = header.group(1)
        elif computations and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found.group(2), found.group(3), is_root=bool(found.group(1))))
    if not entry:
        raise ValueError("expected the text of an HLO module with an ENTRY computation, found none")
    return Program(computations, entry)


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes, rest = _shapes(rest[:end]), rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = rest[opening + 1 : closing]
    if rest[:opening] in ("parameter", "constant"):
        names: tuple[str, ...] = (operands,)  # a number
    else:
        # A CPU's text may say an operand's shape before its name.
        names = tuple(each.split("%")[-1].strip() for each in re.split(r",\s*(?=[^,]*%)", operands) if "%" in each)
    return Instruction(name, shapes, rest[:opening], names, rest[closing + 1 :], is_root)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"expected a closing bracket in {text[:80]!r}, found none")


def _shapes(text: str) -> tuple[Shape, ...]:
    """S(0) is the chip's main memory, also where nothing is said."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size) for size in dims.split(",") if size)
        found.append(Shape(dtype, sizes, space is None or space.group(1) == "0"))
    return tuple(found)
