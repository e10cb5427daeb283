"""The figures of `python -m infer.cost`: what is read off a compiled program."""

from __future__ import annotations

import dataclasses

import jax

from clover_jax.tree import PLAIN, AnyTree
from infer.cost_programs import Programs, program_text
from infer.program_cost import Cost, cost
from infer.program_text import parse

PARTS = ("propose", "verify", "accept", "commit", "advance")
OTHER = ""  # what belongs to no part


@dataclasses.dataclass(frozen=True)
class Roof:
    """What the machine allows.

    Attributes:
      cycles_per_byte: of the compiler's best streaming product.
    """

    cycles_per_byte: float

    def cycles(self, size: float) -> float:
        """Of reading `size` bytes."""
        return size * self.cycles_per_byte


@dataclasses.dataclass(frozen=True)
class Figures:
    """One step of one program on one chip.

    Attributes:
      greedy: what it costs, the cheapest branch of every conditional taken.
      sampled: its cycles with the dearest branches taken, those of top-k and top-p.
      roofline: by part, the cycles of reading what it needs.
      outside: cycles of the program outside its loop, once per call.
      hbm: bytes of arguments, results and temporaries.
    """

    greedy: Cost
    sampled: float
    roofline: dict[str, float]
    outside: float
    hbm: float

    @property
    def over_roofline(self) -> float:
        """A greedy step over its roofline."""
        return self.greedy.total / sum(self.roofline.values())


def decode_figures(programs: Programs, tree: AnyTree, roof: Roof) -> Figures:
    """A step of the decode loop."""
    roofline = decode_roofline(programs, tree, roof)
    return _figures(programs.decode(tree), roofline, roof, programs.smallest_large())


def prefill_figures(programs: Programs, roof: Roof) -> Figures:
    """A step of the prefill loop of the target alone: one chunk of tokens."""
    read = programs.layer_bytes() + programs.cache_bytes(programs.target)
    roofline = {OTHER: roof.cycles(read)}
    return _figures(programs.prefill(PLAIN), roofline, roof, programs.smallest_large())


def decode_roofline(programs: Programs, tree: AnyTree, roof: Roof) -> dict[str, float]:
    """By part, the cycles of reading parameters and caches: once in a pass of the target and in the
    head's reading, and once for each level that is drafted."""
    read = {"verify": programs.target_bytes() + programs.cache_bytes(programs.target)}
    if tree.depth:
        head = programs.draft_bytes()
        later = tree.depth - 1
        read["propose"] = (
            head["fc1"] + tree.depth * head["lm_rows"] + later * (head["ad2"] + head["fc2"])
        )
        block = sum(size for name, size in head.items() if name.startswith("block_"))
        read["advance"] = head["ad1"] + block + programs.cache_bytes(programs.head.block)
    return {part: roof.cycles(size) for part, size in read.items()}


def measure_roof(text: str, size: int) -> Roof:
    """The roof, from the program of a product that reads `size` bytes of weights."""
    program = parse(text)
    return Roof(max(i.cycles or 0 for i in program.computations[program.entry]) / size)


def _figures(
    compiled: jax.stages.Compiled, roofline: dict[str, float], roof: Roof, large: int
) -> Figures:
    program = parse(program_text(compiled))
    loop, rate = program.loop(), roof.cycles_per_byte
    memory = compiled.memory_analysis()
    assert memory is not None  # the TPU compiler knows it
    hbm = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Figures(
        greedy=cost(program, loop, PARTS, rate, large, "cheapest"),
        sampled=cost(program, loop, PARTS, rate, large, "dearest").total,
        roofline=roofline,
        outside=sum(i.cycles or 0 for i in program.computations[program.entry]),
        hbm=hbm - memory.alias_size_in_bytes,
    )
