"""Reads a program that XLA compiled for a TPU: what runs in its loop, and the compiler's estimates.

The text of a compiled module (`compiled.as_text()`) lists computations of instructions, and a shape
tells where an array lies: `S(1)` after its layout is on-chip memory, no such mark is HBM.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_WIDTH |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations)"
    r"=\{?%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_UNKNOWN = 2**63 - 1  # what stands for "no estimate", where something stands at all

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

Branch = Literal["cheapest", "dearest"]


class Array(NamedTuple):
    """One array of a shape: its dtype, dimensions, and whether it lies in HBM."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.dims) * _WIDTH.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name, kind: such as "fusion.3" and "fusion".
      arrays: what it writes.
      operands: names of the instructions it reads, of the same computation.
      called: the computations it runs or consists of.
      cycles: the compiler's estimate, or None.
      value: of a whole constant, else None.
      op_name: where in the traced program it comes from; "" if the compiler added it.
      target: what a custom-call calls, else "".
    """

    name: str
    kind: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    cycles: int | None
    value: int | None
    op_name: str
    target: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A module: the instructions of each computation, and which computation is the entry."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    def loop(self) -> str:
        """The body of the loop in the entry; of several the one with the most instructions.

        Raises:
          ValueError: the entry has no loop.
        """
        loops = [i for i in self.computations[self.entry] if i.kind == "while"]
        bodies = [name for i in loops for name in i.called if len(self.computations[name])]
        if not bodies:
            raise ValueError(f"the program's entry {self.entry} has no loop")
        return max(bodies, key=lambda name: len(self.computations[name]))

    def trips(self, loop: Instruction) -> int:
        """How often a `while` runs: what its condition compares with, if that is one constant.

        Loops of `fori_loop` with fixed bounds count from 0. Any other loop counts once.
        """
        values = [
            i.value
            for name in loop.called
            for i in self.computations[name]
            if i.value is not None and self._is_condition(name)
        ]
        return values[0] if len(values) == 1 else 1

    def _is_condition(self, name: str) -> bool:
        last = self.computations[name][-1]
        return [a.dtype for a in last.arrays] == ["pred"]


class Run(NamedTuple):
    """An instruction that runs, how often, and the array of every instruction it may name."""

    instruction: Instruction
    times: int
    part: str
    scope: Mapping[str, Instruction]


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape, in the text's own notation."""
    return tuple(
        Array(dtype, tuple(int(d) for d in dims.split(",") if d), "S(" not in layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


def parse(text: str) -> Program:
    """Parses the text of a compiled module.

    Raises:
      ValueError: no entry computation in it.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", list[str]()
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name, lines = head[2], []
            entry = name if head[1] else entry
        elif (line == "}" or line.startswith("}, ")) and name:
            computations[name] = tuple(map(_instruction, lines))
            name = ""
        elif name and line.startswith(" ") and " = " in line:
            lines.append(line.strip().removeprefix("ROOT "))
        elif name and lines:  # a kernel's metadata goes over several lines
            lines[-1] += line
    if not entry:
        raise ValueError("the text has no ENTRY computation")
    return Program(computations, entry)


def _instruction(line: str) -> Instruction:
    name, _, rest = line.partition(" = ")
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    kind, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    operands, rest = rest[: end - 1], rest[end:]
    called = _CALLED.findall(rest)
    for branches in _BRANCHES.findall(rest):
        called += [b.strip().lstrip("%") for b in branches.split(",")]
    cycles = _CYCLES.search(rest)
    op_name, target = _OP_NAME.search(rest), _TARGET.search(rest)
    known = cycles is not None and int(cycles[1]) != _UNKNOWN
    return Instruction(
        name=name.lstrip("%"),
        kind=kind,
        arrays=arrays(shape),
        operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
        called=tuple(called),
        cycles=int(cycles[1]) if cycles is not None and known else None,
        value=int(operands) if kind == "constant" and operands.isdecimal() else None,
        op_name=op_name[1] if op_name else "",
        target=target[1] if target else "",
    )


def _closing(text: str) -> int:
    """The place after the parenthesis that closes the one `text` begins with."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")


def runs(
    program: Program, computation: str, branch: Branch, parts: tuple[str, ...]
) -> Iterator[Run]:
    """What runs when a computation runs once, inner loops and calls followed.

    A fusion is one instruction. An inner loop counts as often as the text says it runs, or once.
    Of a conditional one branch runs: the cheapest or the dearest by the estimates.

    Args:
      parts: names of scopes (`jax.named_scope`); an instruction belongs to the last of them in its
        op_name, or else to its caller's. "" is none. What the compiler added without an op_name
        belongs to the part it stands in: the text is in the order in which it runs.
    """
    yield from _runs(program, computation, branch, parts, 1, "")


def _runs(
    program: Program,
    computation: str,
    branch: Branch,
    parts: tuple[str, ...],
    times: int,
    caller: str,
) -> Iterator[Run]:
    scope = {i.name: i for i in program.computations[computation]}
    part = caller
    for instruction in scope.values():
        if instruction.op_name:
            names = instruction.op_name.split("/")
            part = next((n for n in reversed(names) if n in parts), caller)
        yield Run(instruction, times, part, scope)
        if instruction.kind == "conditional":
            choices = [
                list(_runs(program, c, branch, parts, times, part)) for c in instruction.called
            ]
            pick = min if branch == "cheapest" else max
            yield from pick(choices, key=_estimate)
        elif instruction.kind == "while":
            trips = times * program.trips(instruction)
            for c in instruction.called:
                yield from _runs(program, c, branch, parts, trips, part)
        elif "call" in instruction.kind.split("-"):
            for c in instruction.called:
                yield from _runs(program, c, branch, parts, times, part)


def _estimate(choice: list[Run]) -> int:
    return sum(r.times * (r.instruction.cycles or 0) for r in choice)
