"""What one step of a compiled loop costs, by the compiler's own estimates.

The compiler estimates the cycles of an instruction as if it ran alone. Beside them run prefetches:
copies between HBM and on-chip memory, without an estimate. Here they advance while the instruction
at hand leaves HBM idle, in the order in which the program starts them, and what an instruction has
to wait for is added.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from infer.program_text import COLLECTIVES, Branch, Instruction, Program, Run, runs

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
_SMALL = 65536  # bytes; without an estimate, what writes less than this is not worth a line
_JOINS = "ConcatBitcast"  # slices that were prefetched apart and lie side by side
_MOVES = ("copy", "transpose")


@dataclasses.dataclass(frozen=True)
class Cost:
    """One step of a loop.

    Attributes:
      cycles: the sum of the compiler's estimates by part; "" is what belongs to no part.
      waiting: cycles that prefetches take beyond the instructions they run beside, by part.
      unknown: instructions without an estimate that write more than 64 KiB, by what they are.
      copies: cache- or weight-sized copies and transposes in HBM, by shape.
      collectives: bytes that each kind of collective writes.
    """

    cycles: dict[str, int]
    waiting: dict[str, float]
    unknown: dict[str, int]
    copies: dict[str, int]
    collectives: dict[str, int]

    @property
    def total(self) -> float:
        """Cycles of the step."""
        return sum(self.cycles.values()) + sum(self.waiting.values())


class _Prefetches:
    """Copies under way, each with the cycles it still needs, the oldest first."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}

    def start(self, name: str, cycles: float) -> None:
        self._left[name] = cycles

    def advance(self, cycles: float) -> None:
        """Lets `cycles` pass in which HBM has nothing else to do."""
        for name in list(self._left):
            done = min(cycles, self._left[name])
            cycles -= done
            self._left[name] -= done
            if cycles <= 0:
                return

    def finish(self, name: str) -> float:
        """How long it takes until a copy and those before it are done; 0 for no copy of ours."""
        if name not in self._left:
            return 0.0
        names = list(self._left)
        before = names[: names.index(name) + 1]
        return sum(self._left.pop(n) for n in before)


def cost(
    program: Program,
    computation: str,
    parts: tuple[str, ...],
    cycles_per_byte: float,
    large: int,
    branch: Branch,
) -> Cost:
    """Adds up what runs when `computation` runs once.

    Args:
      parts: names of scopes to tell apart (see `runs`).
      cycles_per_byte: of reading HBM, at best.
      large: bytes; a copy of at least so many is cache- or weight-sized.
      branch: which branch of a conditional runs.
    """
    cycles, unknown, copies, collectives = (Counter[str]() for _ in range(4))
    waiting: defaultdict[str, float] = defaultdict(float)
    prefetches = _Prefetches()
    for run in runs(program, computation, branch, parts):
        instruction, times = run.instruction, run.times
        if instruction.kind.removesuffix("-start") in COLLECTIVES:
            size = sum(a.size for a in instruction.arrays)
            collectives[instruction.kind.removesuffix("-start")] += times * size
        moved = _moved(instruction)
        if moved:
            prefetches.start(instruction.name, times * moved * cycles_per_byte)
        elif instruction.kind in ("copy-done", "slice-done"):
            waiting[run.part] += prefetches.finish(instruction.operands[0])
        elif instruction.cycles is not None:
            cycles[run.part] += times * instruction.cycles
            idle = instruction.cycles - _hbm_bytes(run) * cycles_per_byte
            prefetches.advance(times * max(0.0, idle))
        elif _works(run):
            unknown[_what(program, instruction)] += times
        if _is_large_copy(program, instruction, large):
            copies[_shape(instruction)] += times
    return Cost(dict(cycles), dict(waiting), dict(unknown), dict(copies), dict(collectives))


def _works(run: Run) -> bool:
    """Whether an instruction without an estimate does something worth mentioning."""
    instruction = run.instruction
    kind = instruction.kind
    if kind in _FREE or kind.endswith(("-done", "-update")) or instruction.target == _JOINS:
        return False
    written = instruction.arrays
    if kind == "dynamic-update-slice":  # in place
        written = run.scope[instruction.operands[1]].arrays
    return sum(a.size for a in written) > _SMALL


def _what(program: Program, instruction: Instruction) -> str:
    """ "sort", ...: a fusion is the scatter in it, or else what it ends in."""
    if instruction.kind == "fusion":
        kinds = [i.kind for i in _inside(program, instruction)]
        return "scatter fusion" if "scatter" in kinds else f"{kinds[-1]} fusion"
    return instruction.target or instruction.kind


def _moved(instruction: Instruction) -> int:
    """Bytes that an asynchronous copy between HBM and on-chip memory moves.

    A copy-start gives (destination, source, token), a slice-start ((source), destination, token).
    """
    if instruction.kind == "copy-start":
        return instruction.arrays[0].size
    if instruction.kind == "slice-start":
        return instruction.arrays[1].size
    return 0


def _hbm_bytes(run: Run) -> int:
    """Bytes of HBM that an instruction reads or writes, at most."""
    read = (run.scope[name].arrays for name in run.instruction.operands if name in run.scope)
    touched = [a for group in (*read, run.instruction.arrays) for a in group]
    return sum(a.size for a in touched if a.in_hbm)


def _is_large_copy(program: Program, instruction: Instruction, large: int) -> bool:
    """Whether it writes a large array to HBM and does nothing but move it."""
    if not any(a.in_hbm and a.size >= large for a in instruction.arrays):
        return False
    if instruction.kind in _MOVES:
        return True
    if instruction.kind != "fusion":
        return False
    inner = _inside(program, instruction)
    kinds = {i.kind for i in inner if any(a.size >= large for a in i.arrays)} - _FREE
    return bool(kinds) and kinds <= {*_MOVES, "reshape", "convert", "slice"}


def _inside(program: Program, fusion: Instruction) -> Iterator[Instruction]:
    """The instructions of a fusion, those of the fusions in it included."""
    for name in fusion.called:
        for instruction in program.computations.get(name, ()):
            if instruction.kind == "fusion":
                yield from _inside(program, instruction)
            else:
                yield instruction


def _shape(instruction: Instruction) -> str:
    array = max(instruction.arrays, key=lambda a: a.size)
    kind = re.sub(r"[.\d]+$", "", instruction.name)
    return f"{kind} {array.dtype}[{','.join(map(str, array.dims))}]"
